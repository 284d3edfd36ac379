"""Times the Triton kernels of flash-linear-attention at the sizes of `python -m pallas_kernels.bench` on a GPU.

Runs in an environment with torch and flash-linear-attention, started by `scripts/bench_kernels.py --peer_python=...`.
"""

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from fla.ops.delta_rule import chunk_delta_rule
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.gla import chunk_gla
from fla.ops.kda import chunk_kda
from fla.ops.linear_attn import chunk_linear_attn
from fla.ops.simple_gla import chunk_simple_gla

B, T, H, K = 2, 8192, 16, 128
SCALAR, VECTOR = (B, T, H), (B, T, H, K)


def main(chosen: tuple[str, ...] = ()) -> None:
    """Times every call, or the one with the given core and kind."""
    calls: dict[tuple[str, str], tuple[Callable[..., Any], tuple[int, ...] | None, bool]] = {
        ('linear_attention', 'no decay'): (lambda q, k, v: chunk_linear_attn(q, k, v, normalize=False), None, False),
        ('linear_attention', 'scalar'): (lambda q, k, v, g: chunk_simple_gla(q, k, v, g), SCALAR, False),
        ('linear_attention', 'vector'): (lambda q, k, v, g: chunk_gla(q, k, v, g), VECTOR, False),
        ('delta_rule', 'no decay'): (lambda q, k, v, beta: chunk_delta_rule(q, k, v, beta), None, True),
        ('delta_rule', 'scalar'): (lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta), SCALAR, True),
        ('delta_rule', 'vector'): (lambda q, k, v, g, beta: chunk_kda(q, k, v, g, beta), VECTOR, True),
    }
    for (core, kind), (call, decay, delta) in calls.items():
        if chosen and chosen != (core, kind):
            continue
        arguments = inputs(decay, delta)
        for what, function in (('forward', forward), ('forward and backward', both)):
            milliseconds = timed(functools.partial(function, call, arguments))
            line = {'core': core, 'problem': kind, 'what': what, 'milliseconds': milliseconds}
            print(json.dumps({**line, 'torch': torch.__version__}), flush=True)


def inputs(decay: tuple[int, ...] | None, delta: bool) -> list[torch.Tensor]:
    generator = torch.Generator('cuda').manual_seed(0)

    def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device='cuda', dtype=torch.float32).to(dtype)

    q, k, v = normal(VECTOR), normal(VECTOR), normal(VECTOR)
    found = [q, torch.nn.functional.normalize(k, dim=-1) if delta else k, v]
    if decay is not None:
        found.append(torch.nn.functional.logsigmoid(3 + normal(decay, torch.float32)))
    if delta:
        found.append(torch.sigmoid(normal(SCALAR)))
    return [array.requires_grad_() for array in found]


def forward(call: Callable[..., Any], arguments: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return call(*arguments)[0]


def both(call: Callable[..., Any], arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    output = call(*arguments)[0]
    return torch.autograd.grad(output, arguments, output.detach())


def timed(function: Callable[[], Any], rounds: int = 30) -> float:
    """Median milliseconds of a call."""
    for _ in range(5):
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    # Queued one after the other, as `pallas_kernels.bench` has it: waiting for each would time its launches too.
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[rounds // 2]


if __name__ == '__main__':
    main(tuple(sys.argv[1:]))
