"""The doors to other frameworks.

Hugging Face folders to engines and back, adapters, and the glue for the Trainer of transformers,
TRL (`hf.py`), Accelerate and Lightning. A framework is imported by the function that needs it; no
lower folder imports from here. What a plain training loop needs belongs into `engine`.
Start at `pretrained.from_pretrained`.
"""
