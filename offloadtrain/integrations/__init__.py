"""Integrations with other frameworks.

They load and save Hugging Face folders, support adapters, and connect to the Trainer of
transformers, TRL (`hf.py`), Accelerate and Lightning. The function that needs a framework imports
it; no lower package imports from here. Code that a plain training loop needs belongs in `engine`.
Start at `pretrained.from_pretrained`.
"""
