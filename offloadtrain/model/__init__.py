"""Models: a transformer, decoder or encoder, its loss, and sampling from it.

Plain PyTorch that knows nothing of offload and nothing of a job; sizes come from
`config.model_shape`. Shape suffixes (`x_BTD`) have a legend in `transformer.py`.
Start at `transformer.py`.
"""
