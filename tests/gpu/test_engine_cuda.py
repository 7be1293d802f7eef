"""What only a GPU can show: the same bits over CUDA streams, pinned memory, waits, failures."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import offloadtrain as ot
from offloadtrain.config.offload import ActivationMode, Fp8Recipe, Precision, WeightTier
from offloadtrain.engine.autograd import compiled
from offloadtrain.engine.autograd.compiled import CompiledForward
from offloadtrain.runtime import kernels
from offloadtrain.runtime.arena import Arena, Ledger
from offloadtrain.runtime.lanes import Buffer, Lane, LaneError, lanes_for, on_lanes
from offloadtrain.runtime.lanes import copy as transfer_copy
from offloadtrain.step.layout.buffers import BufferSpec
from offloadtrain.step.layout.tiers import Tier
from offloadtrain.step.proof.prove import prove
from tests.gpu.precision import DEVICE, DTYPE, DTYPES, HAS_GPU, NAME, offload
from tests.numerics import test_float8
from tests.numerics.comparison import follow
from tests.numerics.models import MODELS, Chain, batches, loss_of
from tests.numerics.reference import DelayedRun, ResidentRun
from tests.recording_lanes import RecordingLanes

pytestmark = pytest.mark.gpu

NORM_TOLERANCE = 1e-14
"""A GPU adds squares in its own order."""


class ResidentOnGpu(ResidentRun):
    """The resident reference with its model on the GPU and its AdamW(fused=True) on the CPU."""

    def apply(self, sums: dict[str, torch.Tensor]) -> None:
        super().apply({name: total.cpu() for name, total in sums.items()})

    @staticmethod
    def _master(param: torch.Tensor) -> nn.Parameter:
        return ResidentRun._master(param.cpu())


@pytest.fixture(autouse=True)
def deterministic() -> object:
    torch.use_deterministic_algorithms(True)
    yield None
    torch.use_deterministic_algorithms(False)


def compare(
    name: str,
    resident_kind: type[ResidentRun],
    *,
    steps: int = 6,
    precision: Precision = NAME,
    **options: Any,
) -> None:
    """Train offloaded and resident: losses, norms, weights and masters must have the same bits."""
    torch.manual_seed(0)
    model = MODELS[name]()
    copied = copy.deepcopy(model).to(DEVICE)
    optimizer = offload(
        model,
        ot.AdamW(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1),
        precision=precision,
        **options,
    )
    resident = resident_kind(
        copied,
        DTYPES[precision],
        clip_norm=options.get("clip_norm"),
        scale=optimizer.loss_scale,
    )
    accum, is_delayed = options.get("grad_accum_steps", 1), issubclass(resident_kind, DelayedRun)
    stream = [tokens.to(DEVICE) for tokens in batches(steps * accum)]
    for step in range(steps):
        micro = stream[step * accum : (step + 1) * accum]
        expected = resident.step(micro, loss_of)
        losses = []
        for tokens in micro:
            loss = loss_of(model, tokens)
            losses.append(loss.detach())
            optimizer.backward(loss)
        optimizer.step()
        assert [loss.item() for loss in losses] == expected
        assert is_delayed or optimizer.grad_norm == pytest.approx(
            resident.norms[-1], rel=NORM_TOLERANCE
        )
    optimizer.synchronize()
    if isinstance(resident, DelayedRun):
        resident.flush()
    for key, param in model.named_parameters():
        assert torch.equal(param.cpu(), resident.params[key].cpu()), key
    on_device = options.get("state_on") == "device"
    for key, state in optimizer.named_state():
        assert torch.equal(state["master"], resident.master(key)), key
        assert not on_device or state["master"].device == DEVICE
    if on_device:
        on_host = {row.owner for row in optimizer.ledger.rows() if row.tier == "host"}
        assert on_host <= {"norms", "padding"}
    optimizer.close()


@pytest.mark.cover(0)
@pytest.mark.draws(0.3)
@pytest.mark.parametrize(
    ("name", "precision", "accum"),
    [
        (name, precision, (1, 3)[(row + column) % 2])
        for row, name in enumerate(MODELS)
        for column, precision in enumerate(DTYPES)
        if (row + column) % 3
    ],
)
def test_same_bits_as_resident_over_streams(name: str, precision: Precision, accum: int) -> None:
    options: dict[str, Any] = {"clip_norm": 0.5, "grad_accum_steps": accum}
    compare(name, ResidentOnGpu, steps=10, precision=precision, **options)


@pytest.mark.cover(0)
@pytest.mark.draws(0.3)
@pytest.mark.parametrize(("name", "accum"), [(name, 1 + n % 2) for n, name in enumerate(MODELS)])
def test_nothing_offloaded(name: str, accum: int) -> None:
    """Masters and moments on the GPU: the bits of torch's fused AdamW there."""
    recomputes = len(name) % 2
    activation = "recompute" if recomputes else "keep"
    options: dict[str, Any] = {"activation": activation, "grad_accum_steps": accum}
    compare(name, ResidentRun, state_on="device", **options)


class DelayedOnGpu(ResidentOnGpu, DelayedRun):
    """The loop with the same delay, on the GPU."""


OPTIONS: dict[str, dict[str, Any]] = {
    "early": {"skip_nonfinite": False, "clip_norm": None},
    "speculative": {"update": "speculative"},
    "speculative, right": {"update": "speculative", "clip_norm": 1e9},
    "delayed": {"update": "delayed"},
    "streamed": {"working": "host"},
    "streamed, one slot": {"working": "host", "device_slots": 1},
    "partly streamed": {"working": "host", "resident_blocks": 1},
    "recompute": {"activation": "recompute"},
    "a part recomputed": {"activation": "recompute", "recompute_blocks": 1},
    "selective": {"activation": "selective"},
    "streamed, selective": {"activation": "selective", "working": "host", "device_slots": 1},
    "streamed, inputs offloaded": {"working": "host", "activation": "offload"},
    "what is saved offloaded": {"activation": "offload_saved", "offload_saved_above": 0},
    "streamed, what is saved offloaded": {
        "working": "host",
        "activation": "offload_saved",
        "offload_saved_above": 0,
    },
    "streamed, delayed": {"working": "host", "update": "delayed"},
    "streamed, speculative": {"working": "host", "update": "speculative", "clip_norm": 1e9},
    "sums on the device": {"sums_on": "device", "grad_accum_steps": 2},
    "some sums on the device": {"sums_on": {"device": 0.5}, "grad_accum_steps": 3},
}


def some_of_each() -> list[tuple[str, str, int]]:
    """Every mode with three models, and every model with three modes or more, with 1 or 2
    microbatches."""
    return [
        (sorted(MODELS)[(3 * row + column) % len(MODELS)], mode, 1 + (row + column) % 2)
        for row, mode in enumerate(OPTIONS)
        for column in range(3)
    ]


@pytest.mark.cover(0)
@pytest.mark.draws(0.3)
@pytest.mark.parametrize(("name", "mode", "accum"), some_of_each())
def test_every_mode_and_placement_over_streams(name: str, mode: str, accum: int) -> None:
    options: dict[str, Any] = {"clip_norm": 0.5, "grad_accum_steps": accum} | OPTIONS[mode]
    compare(name, DelayedOnGpu if "delayed" in mode else ResidentOnGpu, **options)


@pytest.mark.cover(0, 1)
@pytest.mark.parametrize("options", OPTIONS)
def test_the_log_of_a_run_over_streams_is_proved(options: str) -> None:
    lanes = RecordingLanes(lanes_for(DEVICE))
    model = Chain(5)
    with on_lanes(lanes):
        optimizer = offload(model, **({"clip_norm": 0.5} | OPTIONS[options]))
    accum = optimizer.grad_accum_steps
    for number, tokens in enumerate(batches(4 * accum)):
        optimizer.backward(loss_of(model, tokens.to(DEVICE)))
        if number % accum == accum - 1:
            optimizer.step()
    optimizer.close()
    assert prove(lanes.program) == []


class Drawing(nn.Module):
    """Dropout in attention, which is kept, and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.down = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.2)
        hidden = F.dropout(F.gelu(attended.transpose(1, 2).flatten(2)), 0.3)
        return x + F.dropout(self.down(hidden), 0.3)


@pytest.mark.parametrize("working", ["device", "host"])
def test_selective_recompute_draws_the_same(working: WeightTier) -> None:
    """The second run skips the draws of attention's kernel, and those after it are the same."""

    def gradients(activation: ActivationMode) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Drawing() for _ in range(3)))
        optimizer = offload(model, activation=activation, working=working)
        x = torch.randn(2, 16, 64).to(DEVICE, DTYPE).requires_grad_()
        loss = model(x).float().square().mean()
        torch.manual_seed(1)
        optimizer.backward(loss)
        optimizer.step()
        assert x.grad is not None
        result = [x.grad.cpu(), *(p.detach().cpu().clone() for p in model.parameters())]
        optimizer.close()
        return result

    assert all(map(torch.equal, gradients("keep"), gradients("selective")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
def test_compiled_layers_draw_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generated code, whatever its budget; it rounds elsewhere."""
    if not HAS_GPU:  # the code generator asks for the device
        monkeypatch.setattr(compiled, "CODE_GENERATOR", "aot_eager")
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Drawing().to(DEVICE)
    x = torch.randn(2, 16, 64).to(DEVICE).requires_grad_()
    gradients = []
    for budget in (1.0, 0.0, 0.15, 0.5):
        forward = CompiledForward(layer, budget)
        torch.manual_seed(3)
        y = forward(x)
        torch.manual_seed(4)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0].cpu())
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu(until="torch.cuda.max_memory_allocated")
def test_the_peak_does_not_grow_with_depth() -> None:
    """Streamed weights and offloaded inputs: what torch's allocator has given out at most."""
    peaks = []
    for depth in (4, 64):
        torch.manual_seed(0)
        model = Chain(depth)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer = offload(model, working="host", activation="offload")
        for tokens in batches(3):
            optimizer.backward(loss_of(model, tokens.repeat(40, 1).to(DEVICE)))
            optimizer.step()
        optimizer.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        optimizer.close()
    assert peaks[1] <= peaks[0] + 64 * 1024  # the allocator rounds each tensor to 512 bytes


WIDTH = 2048 if HAS_GPU else 64


class TinyComputeBigTransfer(nn.Module):
    """Wide layers over one row: copies and Adam take far longer than compute, so races show."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("working", ["device", "host"])
def test_race_provoking_shapes(working: WeightTier) -> None:
    torch.manual_seed(0)
    model = TinyComputeBigTransfer()
    copied = copy.deepcopy(model).to(DEVICE)
    optimizer = offload(
        model,
        ot.AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        working=working,
    )
    resident = ResidentOnGpu(copied, DTYPE, lr=1e-3)
    inputs = [torch.randn(1, WIDTH, device=DEVICE, dtype=DTYPE) for _ in range(20)]

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = net(x)
        return output.float().square().mean()

    # In separate loops: the other model's work would give a missing wait time to go unnoticed.
    losses = []
    for x in inputs:
        value = loss(model, x)
        optimizer.backward(value)
        optimizer.step()
        losses.append(value.detach())
    optimizer.synchronize()
    expected = [resident.step([x], loss)[0] for x in inputs]
    assert [value.item() for value in losses] == expected
    for key, param in model.named_parameters():
        assert torch.equal(param.cpu(), resident.params[key].cpu()), key
    optimizer.close()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("options", [{}, {"working": "host", "activation": "offload"}], ids=str)
def test_fp8_has_the_bits_of_a_converted_model(recipe: Fp8Recipe, options: dict[str, Any]) -> None:
    if HAS_GPU and torch.cuda.get_device_capability(DEVICE) < (8, 9):
        pytest.skip("no FP8 products")
    model = test_float8.made()
    copied = test_float8.converted(model, recipe, emulate=not HAS_GPU).to(DEVICE)
    optimizer = offload(model, test_float8.RULE, precision="bf16", fp8=recipe, **options)
    resident = ResidentOnGpu(copied, torch.bfloat16)
    stream = [tokens.to(DEVICE) for tokens in batches(4)]
    follow(resident, optimizer, model, stream, norm_tolerance=NORM_TOLERANCE)
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"working": "host", "activation": "recompute"}], ids=str)
def test_fused_kernels_have_the_bits_of_a_resident_model(options: dict[str, Any]) -> None:
    """Liger's read weights in kernels of Triton and, in its loss, without the head's call."""
    if not HAS_GPU or find_spec("liger_kernel") is None:
        pytest.skip("Liger's kernels need a GPU")
    transformers = pytest.importorskip("transformers")
    liger = pytest.importorskip("transformers.integrations.liger")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    copied = copy.deepcopy(model).to(DEVICE)
    names = [name for name, _ in model.named_parameters()]
    for each in (model, copied):
        liger.apply_liger_kernel(each, None)
    assert [name for name, _ in model.named_parameters()] == names
    optimizer = offload(model, test_float8.RULE, precision="bf16", **options)
    resident = ResidentOnGpu(copied, torch.bfloat16)

    def loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return result

    for tokens in (batch.to(DEVICE) for batch in batches(4)):
        (expected,) = resident.step([tokens], loss)
        value = loss(model, tokens)
        optimizer.backward(value)
        optimizer.step()
        assert value.item() == expected
        assert optimizer.grad_norm == pytest.approx(resident.norms[-1], rel=NORM_TOLERANCE)
    optimizer.close()


def test_masters_come_back_to_the_host_as_they_were() -> None:
    placements: list[dict[str, Any]] = [{}, {"working": "host"}, {"state_on": "device"}]
    for options in placements:
        model = Chain()
        expected = {name: param.detach().clone() for name, param in model.named_parameters()}
        optimizer = offload(model, ot.AdamW(), **options)
        masters = dict(optimizer.master_weights())
        assert masters.keys() == expected.keys()
        for name, value in masters.items():
            assert value.device.type == "cpu" and torch.equal(value, expected[name]), name
        optimizer.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"working": "host"}, {"state_on": "device"}, {"state_on": {"device": 0.5}}],
    ids=str,
)
def test_averages_and_sent_weights_of_each_step(options: dict[str, Any]) -> None:
    """Nothing else waits for the lanes: the expected values are another optimizer's."""
    torch.manual_seed(0)
    models = [Chain() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    first, second = (offload(model, ot.AdamW(lr=1e-2), **options) for model in models)
    ema = ot.EMA(first, 0.5)
    expected: dict[str, torch.Tensor] = {}
    for tokens in batches(5):
        for optimizer, model in zip((first, second), models, strict=True):
            optimizer.backward(loss_of(model, tokens.to(DEVICE)))
            optimizer.step()
        ema.update()
        masters = dict(second.master_weights())
        for name, master in masters.items():
            expected[name] = expected[name].lerp(master, 0.5) if name in expected else master
    for name, weights in first.working_weights():
        assert weights.device == DEVICE
        assert torch.equal(weights.cpu(), masters[name].to(weights.dtype)), name
    for name, average in ema.weights():
        assert average.device.type == "cpu" and torch.equal(average, expected[name]), name
    first.close()
    second.close()


@pytest.mark.gpu(until="cuda_driver.register")
def test_the_arena_is_pinned_and_kernels_take_it() -> None:
    ledger = Ledger()
    arena = Arena(ledger, pin=True)
    (memory,) = arena.map([BufferSpec("test", 1 << 20, "float32")])
    assert arena.pinned
    assert memory.is_pinned() and memory[1000:].is_pinned()
    kernels.cast(torch.randn(1 << 20), memory)
    on_device = torch.empty(1 << 20, device=DEVICE)
    on_device.copy_(memory, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), memory)
    arena.close()
    assert ledger.total(Tier.HOST) == 0


def test_lanes_keep_their_order_under_delays() -> None:
    lanes = lanes_for(DEVICE)
    host = Buffer("host", torch.zeros(1 << 20, pin_memory=HAS_GPU))
    device = Buffer("device", torch.zeros(1 << 20, device=DEVICE))
    for round_ in range(1, 6):
        if HAS_GPU:
            torch.cuda._sleep(20_000_000)
        lanes.launch(Lane.COMPUTE, "fill", lambda t, r=round_: t.fill_(r), (), [device.whole])
        lanes.wait(Lane.D2H, lanes.record(Lane.COMPUTE), "filled")
        lanes.launch(Lane.D2H, "down", transfer_copy, [device.whole], [host.whole])
        lanes.wait(Lane.HOST, lanes.record(Lane.D2H), "down")
        lanes.launch(Lane.HOST, "double", lambda t: t.mul_(2), (), [host.whole])
        lanes.wait(Lane.H2D, lanes.record(Lane.HOST), "doubled")
        lanes.launch(Lane.H2D, "up", transfer_copy, [host.whole], [device.whole])
        lanes.wait(Lane.COMPUTE, lanes.record(Lane.H2D), "up")
        assert bool((device.flat == 2 * round_).all())
    lanes.close()


def test_a_failure_on_the_host_lane_is_raised_and_nothing_hangs() -> None:
    lanes = lanes_for(DEVICE)
    buffer = Buffer("host", torch.zeros(4))

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("planned")

    lanes.launch(Lane.HOST, "fail", fail, (), [buffer.whole])
    with pytest.raises(LaneError, match="planned"):
        lanes.synchronize()
    lanes.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["chain", "partly used"])
def test_training_waits_for_nothing_but_the_norm(name: str) -> None:
    """Nor in a step in which other parameters have a gradient than before."""
    model: Any = MODELS[name]()
    optimizer = offload(model)
    tokens = batches(1)[0].to(DEVICE)
    for _ in range(3):
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
    if name == "partly used":
        for layer in model.layers:
            layer.uses_spare = not layer.uses_spare
    try:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("error")
        optimizer.backward(loss_of(model, tokens))
        optimizer.step()
    finally:
        if HAS_GPU:
            torch.cuda.set_sync_debug_mode("default")
    optimizer.close()


def test_the_timeline_shows_adam_and_uploads() -> None:
    model, lanes = TinyComputeBigTransfer(), lanes_for(DEVICE)
    with on_lanes(lanes):
        optimizer = offload(model)
    x = torch.randn(1, WIDTH, device=DEVICE, dtype=DTYPE)
    optimizer.backward(model(x).float().square().mean())
    lanes.launch(Lane.HOST, "slow", lambda: time.sleep(0.05))  # the next forward waits for Adam
    optimizer.step()
    optimizer.sample_timeline()
    optimizer.backward(model(x).float().square().mean())
    optimizer.step()
    report = optimizer.last_step
    assert report is not None
    names = {interval.lane for interval in report.timeline}
    assert names == {"compute", "wait", "d2h", "host", "h2d"}
    waited_ms = sum(span.duration_ms for span in report.timeline if span.lane == "wait")
    assert sum(report.exposed_by_lane.values()) == pytest.approx(waited_ms)
    optimizer.close()


@pytest.mark.gpu(until="torch.cuda._sleep")
def test_what_compute_waits_is_read_off_its_stream() -> None:
    """A host lane that is busy for 50 ms, with compute that has nothing to do meanwhile, and with
    compute that is busy itself for longer."""
    lanes = lanes_for(DEVICE)
    spent = []
    for cycles in (0, 400_000_000):
        lanes.synchronize()
        before_ms = lanes.read_totals().exposed_ms
        lanes.launch(Lane.HOST, "slow", lambda: time.sleep(0.05))
        if cycles:
            torch.cuda._sleep(cycles)
        lanes.wait(Lane.COMPUTE, lanes.record(Lane.HOST), "slow")
        torch.cuda.synchronize()
        spent.append(lanes.read_totals().exposed_ms - before_ms)
    lanes.close()
    assert 40 <= spent[0] and spent[1] <= 10


def test_every_lane_tells_how_long_it_worked() -> None:
    """By events of the streams, read when they have happened: never by waiting."""
    torch.manual_seed(0)
    model = Chain(6)
    optimizer = offload(model, clip_norm=1.0, working="host")
    totals = dict.fromkeys(map(str, Lane), 0.0)
    began = torch.cuda.Event(enable_timing=True)
    ended = torch.cuda.Event(enable_timing=True)
    began.record()
    for tokens in batches(8):
        optimizer.backward(loss_of(model, tokens.to(DEVICE)))
        optimizer.step()
        assert optimizer.last_step is not None
        for lane, busy_ms in optimizer.last_step.busy_ms.items():
            assert busy_ms >= 0
            totals[lane] += busy_ms
    optimizer.synchronize()
    ended.record()
    ended.synchronize()
    wall_ms = began.elapsed_time(ended)
    assert all(0 < totals[lane] <= wall_ms for lane in ("compute", "d2h", "host", "load"))
    optimizer.close()


def test_a_host_lane_waits_for_a_stream_without_python() -> None:
    """The native queue waits for an event through the driver's own function."""
    lanes = lanes_for(DEVICE)
    device = Buffer("device", torch.ones(1 << 24, device=DEVICE))
    host = Buffer("host", torch.zeros(1 << 24, pin_memory=HAS_GPU))
    total = Buffer("sum", torch.zeros(1 << 24))
    for round in range(1, 6):
        device.flat.mul_(2.0)
        ready = lanes.record(Lane.COMPUTE)
        lanes.wait(Lane.D2H, ready, "computed")
        lanes.launch(Lane.D2H, "down", transfer_copy, [device.whole], [host.whole])
        lanes.wait(Lane.HOST, lanes.record(Lane.D2H), "down")
        add = kernels.KernelCalls(lambda grad, total: kernels.accumulate(total, grad, False))
        lanes.launch(Lane.HOST, "add", add, [host.whole], [total.whole])
        lanes.wait(Lane.D2H, lanes.record(Lane.HOST), "added")
        lanes.host_wait(lanes.record(Lane.HOST), "added")
        assert total.flat.eq(2.0 ** (round + 1) - 2.0).all()
    lanes.close()


def _fill_the_card_in_backward(_: nn.Module, __: object, output: torch.Tensor) -> None:
    """When the gradient comes back to here: blocks behind have delivered theirs."""

    def fail(grad: torch.Tensor) -> None:
        if HAS_GPU:
            torch.empty(2 * torch.cuda.mem_get_info()[0], dtype=torch.uint8, device=DEVICE)
        raise torch.OutOfMemoryError("planted, where there is no card")

    output.register_hook(fail)


def test_out_of_memory_in_the_middle_of_a_step_leaves_a_usable_engine() -> None:
    """The step is dropped: what follows has the bits of a run that never tried it."""
    losses: dict[bool, list[float]] = {}
    for tries in (False, True):
        torch.manual_seed(0)
        model = Chain(4)
        optimizer = offload(model, ot.AdamW(lr=1e-2), clip_norm=0.5)
        losses[tries] = []
        for step, tokens in enumerate(batches(6)):
            if tries and step == 3:
                handle = model.layers[1].register_forward_hook(_fill_the_card_in_backward)
                with pytest.raises(torch.OutOfMemoryError):
                    optimizer.backward(loss_of(model, tokens.to(DEVICE)))
                handle.remove()
                optimizer.zero_grad()
            loss = loss_of(model, tokens.to(DEVICE))
            optimizer.backward(loss)
            optimizer.step()
            losses[tries].append(loss.item())
        assert "master weights" in optimizer.ledger.summary()
        optimizer.close()
    assert losses[True] == losses[False]


def test_a_group_of_one_over_nccl() -> None:
    """No collective is launched, and the bits are those of no group at all."""
    losses = []
    for grouped in (False, True):
        if grouped:
            store = torch.distributed.HashStore()  # type: ignore[attr-defined]
            backend = "cpu:gloo,cuda:nccl" if HAS_GPU else "gloo"
            torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        torch.manual_seed(0)
        model = Chain(3)
        optimizer = offload(model, ot.AdamW(lr=1e-2), clip_norm=0.5)
        assert optimizer.ranks.is_single
        of_steps = []
        for tokens in batches(4):
            loss = loss_of(model, tokens.to(DEVICE))
            optimizer.backward(loss)
            optimizer.step()
            of_steps.append(loss.item())
        assert optimizer.last_step is not None and optimizer.last_step.comm_bytes == 0
        losses.append(of_steps)
        optimizer.close()
    torch.distributed.destroy_process_group()
    assert losses[0] == losses[1]


SANITIZED = {
    "streamed": OPTIONS["streamed"],
    "recompute": OPTIONS["recompute"],
    "not offloaded": {"state_on": "device", "grad_accum_steps": 2},
}


def train_sanitized(options: str) -> None:
    torch.manual_seed(0)
    model = Chain(4)
    optimizer = offload(model, **{"clip_norm": 0.5} | SANITIZED[options])
    for number, tokens in enumerate(batches(4)):
        optimizer.backward(loss_of(model, tokens.to(DEVICE)))
        if number % 2 or options != "not offloaded":
            optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("options", SANITIZED)
def test_the_stream_sanitizer_finds_nothing(options: str) -> None:
    """torch's own, which knows streams and events, and none of the lanes' declarations. It must be
    there from the start of a process. It follows waits for events and not queries: so threads wait
    for events that have happened, too. What it reports otherwise:
    `test_what_the_stream_sanitizer_cannot_see`."""
    if not HAS_GPU:
        train_sanitized(options)
        return
    code = f"""
from offloadtrain.runtime.lanes.stream_times import StreamEvent
from tests.gpu import test_engine_cuda as here
StreamEvent.has_happened = lambda event: False
here.train_sanitized({options!r})
"""
    environment = os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "data race" not in done.stderr, done.stderr[-3000:]
