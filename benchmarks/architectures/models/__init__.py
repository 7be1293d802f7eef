"""The architectures, by kind."""

from __future__ import annotations

from benchmarks.architectures.architecture import Architecture
from benchmarks.architectures.models.decoders import DECODERS
from benchmarks.architectures.models.diffusion import DIFFUSION
from benchmarks.architectures.models.encoders import ENCODERS
from benchmarks.architectures.models.experts import EXPERTS
from benchmarks.architectures.models.images import IMAGES_ALONE
from benchmarks.architectures.models.multimodal import MULTIMODAL
from benchmarks.architectures.models.pairs import PAIRS_OF_TEXT
from benchmarks.architectures.models.recurrent import RECURRENT
from benchmarks.architectures.models.sound import SOUND

__all__ = ["ARCHITECTURES", "DIFFUSION", "Architecture"]

ARCHITECTURES: dict[str, Architecture] = {
    **DECODERS,
    **EXPERTS,
    **RECURRENT,
    **ENCODERS,
    **PAIRS_OF_TEXT,
    **IMAGES_ALONE,
    **SOUND,
    **MULTIMODAL,
    **DIFFUSION,
}
