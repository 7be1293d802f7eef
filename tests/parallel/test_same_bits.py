"""Models divided among ranks: the bits of the same parts without stages, the bits of any other
placement, and values near those of the whole model.

A pipeline without flushes has the bits of `update="delayed"`. All programs are proved.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.distributed.conftest import Run
from tests.parallel.mesh_runs import (
    LR,
    Mesh,
    MeshRun,
    Options,
    assert_same_bits,
    expert_steps_of,
    run_on,
    whole_masters,
    worst_difference,
)

PROOF = {"lanes": "proof"}
THREADS = {"lanes": "threads"}
TWO: Mesh = {"pp": 2, "dp": 1}
FOUR: Mesh = {"pp": 4, "dp": 1}
REPLICAS: Mesh = {"pp": 2, "dp": 2}
PARTS: Mesh = {"pp": 2, "dp": 1, "tp": 2}
EXPERTS: Mesh = {"pp": 2, "dp": 1, "ep": 2}

CLIP: Options = {"clip_norm": 0.3}
FP32: Options = {"precision": "fp32"} | CLIP
FP16: Options = {"precision": "fp16"}
OVERFLOWS: Options = FP16 | {"scale": 2.0**24, "steps": 9}
HOST: Options = {"working": "host"}
RECOMPUTE: Options = {"activation": "recompute"}
SELECTIVE: Options = {"activation": "selective"}
OFFLOAD: Options = {"activation": "offload"}
SAVED: Options = {"activation": "offload_saved", "offload_saved_above": 0}
PARTITIONED: Options = {"partition_activations": True}
SPLIT16: Options = {"state": "split16"}
DEVICE: Options = {"state_on": "device"}
SPECULATIVE: Options = {"update": "speculative"}
GPIPE: Options = {"schedule": "gpipe"}
INTERLEAVED: Options = {"schedule": "interleaved"}
TWO_VERSIONS: Options = {"schedule": "2bw"}
SKIPPING: Options = {"skip_unused": ("*.experts.*",)} | FP32

CHANGE_BITS = {
    *("precision", "state", "clip_norm", "reduction", "skip_nonfinite", "skip_unused"),
    *("loss_scale_hysteresis", "sums_on", "steps", "scale", "skipped", "synchronized", "groups"),
    "on_meta",
}
"""Options that the run to compare with has, too; "delayed" updates are another one."""


def case(*values: Any, long: bool = False) -> Any:
    texts = ("-".join(map(str, v.values())) if isinstance(v, dict) else str(v) for v in values)
    marks = (pytest.mark.long,) if long else ()
    return pytest.param(*values, id="; ".join(texts), marks=marks)


def flat(mesh: Mesh, options: Options) -> tuple[Mesh, Options]:
    """The mesh without stages, and the options that change bits."""
    plain = {key: value for key, value in options.items() if key in CHANGE_BITS}
    if options.get("schedule") == "2bw" or options.get("update") == "delayed":
        plain["update"] = "delayed"
    return {axis: size for axis, size in mesh.items() if axis != "pp"}, plain


STAGES = [
    case("gpt", TWO, GPIPE | HOST | RECOMPUTE),
    case("gpt", TWO, FP16 | CLIP),
    case("gpt", TWO, INTERLEAVED | SPECULATIVE | CLIP),
    case("gpt", TWO, {"update": "delayed", "layers_per_stage": (6, 2)} | CLIP),
    case("gpt", FOUR, SPLIT16 | CLIP),
    case("gpt", REPLICAS, {"zero_stage": 2} | SAVED | CLIP),
    case("gpt", REPLICAS, {"zero_stage": 3} | HOST | CLIP),
    case("gpt, experts", TWO, RECOMPUTE | CLIP),
    case(
        *("gpt", TWO, INTERLEAVED | FP32 | DEVICE | {"layers_per_stage": (1, 3, 3, 1)}),
        long=True,
    ),
    case("gpt", TWO, OFFLOAD | HOST | {"device_slots": 1, "groups": True}, long=True),
    case("gpt", FOUR, FP16 | INTERLEAVED, long=True),
    case("gpt", TWO, INTERLEAVED | CLIP | {"sums_on": {"device": 0.4}}),
    case("gpt", TWO, SELECTIVE | HOST | CLIP, long=True),
    case("gpt", TWO, OFFLOAD | {"recompute_blocks": 1, "skip_nonfinite": False}, long=True),
    # Stages of a single layer that gets the model's own fp32 input; forwards that compute between
    # layers; outputs of several tensors.
    case("layers", TWO, INTERLEAVED | CLIP),
    case("between", TWO, CLIP),
    case("pair", TWO, CLIP),
    # Models of transformers.
    case("Llama", TWO, {"on_meta": True}),
    case("Gemma2", TWO, RECOMPUTE | HOST | CLIP),
    case("GPT2", TWO, INTERLEAVED | CLIP),
    case("Gemma3Text", REPLICAS, {"zero_stage": 2} | CLIP),
    case("Llama", TWO, TWO_VERSIONS | CLIP),
    case("Mixtral", TWO, FP32),
    case("Mistral", TWO, FP16 | GPIPE, long=True),
    case("Llama", TWO, INTERLEAVED | {"on_meta": True}, long=True),
    case("GPTNeoX", TWO, SAVED, long=True),
    # Matrices in parts, experts of other ranks, and layers of which each replica uses other parts.
    case("llama", {"pp": 2, "tp": 2}, OVERFLOWS | GPIPE),
    case("llama", PARTS, FP32 | INTERLEAVED, long=True),
    case("llama, sequence", PARTS, FP32 | TWO_VERSIONS),
    case("llama, sequence", PARTS, FP32 | RECOMPUTE),
    case("llama", PARTS, FP32 | HOST | RECOMPUTE | PARTITIONED),
    case("llama", PARTS, FP32 | HOST | SELECTIVE | PARTITIONED, long=True),
    case("llama", PARTS, FP32 | OFFLOAD | PARTITIONED | THREADS),
    case("llama", {"pp": 2, "dp": 2, "tp": 2}, CLIP | {"zero_stage": 3} | DEVICE, long=True),
    case("deep experts", {"pp": 2, "ep": 2}, FP32),
    case("deep experts", EXPERTS, FP16 | GPIPE | CLIP),
    case("deep experts", EXPERTS, FP32 | INTERLEAVED),
    case("deep experts", EXPERTS, FP32 | {"zero_stage": 3} | RECOMPUTE),
    case("deep experts", EXPERTS, FP32 | HOST | OFFLOAD),
    case("deep experts", EXPERTS, FP32 | {"update": "delayed"} | DEVICE),
    case("many experts", TWO, SKIPPING | GPIPE | HOST | RECOMPUTE),
    case("many experts", EXPERTS, SKIPPING),
    case("many experts", REPLICAS, SKIPPING | INTERLEAVED | {"zero_stage": 2}, long=True),
    case("partly used", REPLICAS, FP32 | {"zero_stage": 3} | RECOMPUTE),
    case("partly used", REPLICAS, FP32 | {"zero_stage": 3} | GPIPE, long=True),
]

UNFLUSHED = [
    case("gpt", TWO, CLIP),
    case("gpt", FOUR, CLIP | RECOMPUTE),
    case("gpt", TWO, FP32 | THREADS | {"groups": True, "synchronized": 2}),
    case("gpt", TWO, CLIP | SPLIT16 | {"skipped": 2}),
    case("gpt", TWO, DEVICE | {"paused": 1}),
    case("gpt", REPLICAS, OFFLOAD | THREADS | {"skipped": 1, "paused": 2}),
    case("gpt, checkpointed", TWO, CLIP),
    case("gpt", TWO, HOST | THREADS | {"device_slots": 1, "paused": 1}),
    case("gpt", FOUR, HOST | SPLIT16 | RECOMPUTE),
    case("gpt", REPLICAS, HOST | CLIP | {"skipped": 2}),
    case("gpt", FOUR, THREADS | {"skipped": 1, "state": "int8"}, long=True),
    case("gpt", TWO, CLIP | {"sums_on": "device"}, long=True),
    case("gpt", TWO, CLIP | {"sums_on": {"device": 0.4}}),
    case("gpt", FOUR, HOST | SAVED, long=True),
    case("gpt", REPLICAS, THREADS | {"zero_stage": 1, "reduction": "fp32"}, long=True),
    case("gpt, experts", TWO, HOST | SPLIT16 | CLIP, long=True),
    case("gpt", REPLICAS, CLIP | {"zero_stage": 3, "paused": 1}, long=True),
    case("gpt, checkpointed", TWO, HOST | {"resident_blocks": 1, "groups": True}, long=True),
]


def assert_some_are_unused(runs: list[MeshRun]) -> None:
    steps = expert_steps_of(runs)
    assert len({count for counts in steps.values() for count in counts}) > 2


@pytest.mark.slow
@pytest.mark.draws(0.7)
@pytest.mark.parametrize(("kind", "mesh", "options"), STAGES)
def test_stages_have_the_bits_of_a_run_without_stages(
    ranks: Run, kind: str, mesh: Mesh, options: Options
) -> None:
    """Losses, norms, clip coefficients, loss scales, skips and masters of every part. The run to
    compare with keeps everything on the device."""
    plain = run_on(ranks, kind, *flat(mesh, options))
    assert_same_bits(plain, run_on(ranks, kind, mesh, PROOF | options))
    if "scale" in options:
        assert {step[3] for step in plain[0].steps} == {False, True}
    if "skip_unused" in options:
        assert_some_are_unused(plain)


@pytest.mark.slow
@pytest.mark.draws(0.7)
@pytest.mark.parametrize(("kind", "mesh", "options"), UNFLUSHED)
def test_a_pipeline_without_flushes_has_the_bits_of_delayed_updates(
    ranks: Run, kind: str, mesh: Mesh, options: Options
) -> None:
    """Two versions of 2 bytes on all stages but the last, two sums of 4 bytes on all but the first,
    whatever is streamed, skipped, paused or flushed between the steps."""
    options = TWO_VERSIONS | PROOF | options
    plain = run_on(ranks, kind, *flat(mesh, options))
    staged = run_on(ranks, kind, mesh, options)
    assert_same_bits(plain, staged)
    if options.keys() <= {"schedule", "lanes", "clip_norm"}:
        stages = mesh["pp"]
        for stage, run in enumerate(staged):
            versions, sums = 1 + (stage < stages - 1), 1 + (stage > 0)
            assert run.memory["working weights", "device"] == 2 * versions * run.numel
            assert run.memory["gradient sums", "host"] == 4 * sums * run.numel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        case(TWO, CLIP | PROOF),
        case(FOUR, HOST | THREADS | {"synchronized": 5, "skipped": 3}),
        case(REPLICAS, RECOMPUTE | {"paused": 4, "loss_scale_hysteresis": 2}),
        case(TWO, DEVICE | {"synchronized": 1}, long=True),
    ],
)
def test_loss_scales_without_flushes_are_those_of_delayed_updates(
    ranks: Run, mesh: Mesh, options: Options
) -> None:
    options = TWO_VERSIONS | OVERFLOWS | {"steps": 14} | options
    plain = run_on(ranks, "gpt", *flat(mesh, options))
    assert_same_bits(plain, run_on(ranks, "gpt", mesh, options))
    scales, skipped = ([step[at] for step in plain[0].steps] for at in (2, 3))
    assert {*skipped} == {True, False} and len({*scales}) > 2, scales
    if not options.keys() & {"loss_scale_hysteresis", "skipped"}:
        # The first overflow halves the scale of the step after the next one; it grows again.
        first = skipped.index(True)
        assert scales[first : first + 3] == [scales[first]] * 2 + [scales[first] / 2]
        assert any(after > now for now, after in pairwise(scales)), scales


TP: Mesh = {"dp": 1, "tp": 2}
EP: Mesh = {"dp": 1, "ep": 2}
BF16: Options = {"precision": "bf16"}
SMALL_CLIP: Options = {"precision": "fp32", "clip_norm": 0.05}

PLACEMENTS = [
    case("llama", TP, FP32, [HOST | {"device_slots": 1}, RECOMPUTE, SPECULATIVE]),
    case("llama, sequence", TP, FP32, [HOST | OFFLOAD, DEVICE, RECOMPUTE | HOST]),
    case("llama, sequence", TP, BF16, [SPECULATIVE | DEVICE, RECOMPUTE], long=True),
    case("llama", TP, OFFLOAD, [OFFLOAD | PARTITIONED | THREADS]),
    case("llama", TP, RECOMPUTE, [HOST | RECOMPUTE | PARTITIONED]),
    case(
        *("llama", {"dp": 2, "tp": 2}, OFFLOAD),
        [OFFLOAD | PARTITIONED | SPECULATIVE | {"zero_stage": 3}],
    ),
    case("llama", {"dp": 1, "tp": 4}, RECOMPUTE, [RECOMPUTE | PARTITIONED], long=True),
    case("Gemma2, shallow", TP, FP32, [HOST | RECOMPUTE]),
    case("Phi3, shallow", TP, FP32, [SPECULATIVE | OFFLOAD]),
    case("Mixtral, shallow", TP, FP32, [HOST | RECOMPUTE], long=True),
    case("sparse Mixtral", TP, {"skip_unused": ("*.experts.*_proj",)} | FP32, [HOST | RECOMPUTE]),
    case(
        *("experts", {"dp": 2, "ep": 2}, SMALL_CLIP),
        [{"zero_stage": 1} | DEVICE, {"zero_stage": 3} | RECOMPUTE, {"reduction": "fp32"}],
    ),
    case(
        *("experts", EP, SMALL_CLIP),
        [OFFLOAD | SPECULATIVE, HOST | RECOMPUTE | {"device_slots": 1}, HOST | SPECULATIVE],
    ),
    case("experts", EP, BF16 | SPLIT16, [OFFLOAD, {"zero_stage": 3} | RECOMPUTE]),
    case("experts", EP, FP16, [SPECULATIVE | SAVED]),
    case("deep experts", EP, SMALL_CLIP, [{"sums_on": "device"}, RECOMPUTE]),
    case("experts", EP, FP16 | {"update": "delayed"}, [HOST | RECOMPUTE], long=True),
    case("one layer of experts", EP, FP32, [{"zero_stage": 3}, HOST]),
    case(
        *("experts", EP | {"tp": 2}, SMALL_CLIP),
        [{"zero_stage": 3} | DEVICE, HOST | RECOMPUTE, {"zero_stage": 1} | SPECULATIVE | OFFLOAD],
    ),
    case("experts", EP | {"tp": 2}, FP16, [RECOMPUTE | PARTITIONED]),
]


@pytest.mark.slow
@pytest.mark.draws(0.7)
@pytest.mark.parametrize(("kind", "mesh", "both", "placements"), PLACEMENTS)
def test_no_placement_changes_a_bit(
    ranks: Run, kind: str, mesh: Mesh, both: Options, placements: list[Options]
) -> None:
    plain = run_on(ranks, kind, mesh, both)
    for options in placements:
        assert_same_bits(plain, run_on(ranks, kind, mesh, PROOF | both | options))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["host", "disk"])
def test_no_disk_changes_a_bit_of_experts(ranks: Run, tmp_path: object, weights: str) -> None:
    disk = {"state_on": "disk", "working": weights, "scratch_dir": f"{tmp_path}"}
    plain = run_on(ranks, "experts", EP, SMALL_CLIP)
    assert_same_bits(plain, run_on(ranks, "experts", EP, PROOF | SMALL_CLIP | disk))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "mesh", "options", "bound"),
    [
        case("llama", TP, {}, 1e-3),
        case("llama, sequence", TP, {}, 1e-3),
        case("llama", {"dp": 2, "tp": 2}, {"zero_stage": 2}, 1e-3),
        case("Llama, shallow", TP, {}, 1e-3),
        case("Qwen2, shallow", TP, {}, 1e-3, long=True),
        case("Gemma2, shallow", TP, {}, 1e-3),
        # Gathered outputs and cut inputs, packed experts, and no plan of their own.
        case("Phi3, shallow", TP, {}, 1e-3),
        case("Mixtral, shallow", TP, {}, 1e-3),
        case("Olmo2, shallow", TP, {}, 1e-3, long=True),
        case("GPT2, shallow", TP, {}, 1e-3, long=True),
        case("experts", EP, SMALL_CLIP, 0.01 * LR),
        case("deep experts", {"dp": 2, "ep": 2}, SMALL_CLIP | {"zero_stage": 1}, 0.01 * LR),
        case("experts", {"dp": 1, "ep": 4}, SMALL_CLIP | RECOMPUTE, 0.01 * LR, long=True),
        case("one choice", EP, SMALL_CLIP, 0.01 * LR),
        case("one choice", {"dp": 1, "ep": 4}, SMALL_CLIP, 0.01 * LR, long=True),
        case("experts", EP | {"tp": 2}, SMALL_CLIP, 0.01 * LR),
        case("experts", {"dp": 2, "ep": 1, "tp": 2}, SMALL_CLIP, 0.01 * LR),
        case("many experts", EP, SKIPPING, 1e-3),
        case("many experts", {"dp": 2, "ep": 2}, SKIPPING | {"zero_stage": 3}, 1e-3),
        case("many experts", {"dp": 1, "ep": 4}, SKIPPING | HOST, 1e-3, long=True),
        # The gradient of its only expert is there, all zeros, where no token came; Adam divides
        # others of a single token that are nearly zero.
        case("two experts", EP, SKIPPING, LR),
        case("many experts", EP | {"ep": 1, "tp": 2}, SKIPPING, 1e-3),
        case(
            *("sparse Mixtral", TP, FP32 | {"skip_unused": ("*.experts.*_proj",)}, 1e-3),
        ),
    ],
)
def test_parts_are_near_the_whole_model(
    ranks: Run,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    mesh: Mesh,
    options: Options,
    bound: float,
) -> None:
    """Sums have another order; replicated weights stay equal, and the norm counts each gradient
    once. `bound` is less than a tenth of what one step moves a weight."""
    options = {"precision": "fp32", "clip_norm": 0.5} | options
    tp, ep = mesh.get("tp", 1), mesh.get("ep", 1)
    plain = run_on(ranks, kind, {"dp": mesh["dp"] * ep}, options)
    divided = run_on(ranks, kind, mesh, PROOF | options)
    norms, worst = [], 0.0
    for rank, run in enumerate(divided):
        assert not run.faults
        expected = plain[rank // tp]
        for step, (figures, of_plain) in enumerate(zip(run.steps, expected.steps, strict=True)):
            assert figures[-1] == pytest.approx(of_plain[-1], rel=1e-4)
            assert figures[:3] == divided[0].steps[step][:3]
            norms.append(abs(figures[0] / of_plain[0] - 1))
        assert expected.divided_numel == 0 < run.divided_numel
        if tp == 1 and "skip_unused" not in options:
            assert run.steps[0][-1] == expected.steps[0][-1]  # forward has the same bits
    for first in range(0, len(divided), tp * ep):
        masters = whole_masters(divided[first : first + tp * ep])
        worst = max(worst, worst_difference(plain[0].masters, masters))
    with capsys.disabled():
        print(
            f"\n{kind}, {mesh}, {options}: the worst master differs by {worst:.2g}, "
            f"the worst norm by {max(norms):.2g} of itself"
        )
    assert worst < bound
    assert max(norms) < (1e-4 if "skip_unused" in options else 1e-5 if tp == 1 else 1e-4)
    assert expert_steps_of(divided) == expert_steps_of(plain)
    if "skip_unused" in options and kind != "two experts":
        assert_some_are_unused(plain)
