"""Models: a transformer, decoder or encoder, its loss, and sampling from it.

Plain PyTorch without any knowledge of offload or jobs; sizes come from `config.model_shape`.
Shape suffixes (`x_BTD`) have a legend in `transformer.py`.
Start at `transformer.py`.
"""
