"""The doors to other frameworks, a page of code each.

Hugging Face folders to engines and back, adapters, and the glue for the Trainer of transformers,
TRL, Accelerate and Lightning. A framework is imported by the function that needs it; nothing below
imports from here. What a plain training loop needs belongs into `engine`.
Start at `pretrained.from_pretrained`.
"""
