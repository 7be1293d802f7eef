"""Which causal language models of transformers can compute their loss in parts of the vocabulary.

    python -m benchmarks.loss_heads

Counts them, and the reasons against the others. Sources are read; no model is made.
"""

from __future__ import annotations

from collections import defaultdict

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from offloadtrain.engine import ModelError
from offloadtrain.integrations.chunked_loss import head_attribute


def main() -> None:
    """Print a line for each reason."""
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {name for one in named for name in ([one] if isinstance(one, str) else one)}
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        why = ""
        try:
            head_attribute(getattr(transformers, name))
        except ModelError as error:
            why = str(error).partition(": ")[2]
        found[why].append(name)
    print(
        f"{len(found.pop('', []))} of {len(names)} classes, transformers {transformers.__version__}"
    )
    for why, refused in sorted(found.items(), key=lambda item: -len(item[1])):
        print(f"{len(refused):4} {why}: {', '.join(refused)}")


if __name__ == "__main__":
    main()
