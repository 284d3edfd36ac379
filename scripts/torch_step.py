"""The benchmark training step in PyTorch, eager or compiled: a process that times steps when it is asked to.

It reads requests from its standard input, and ends with it. `burst N` answers with one JSON line, the seconds of each
of N steps and their total processor seconds; `save PATH` writes an .npz with the parameters, the batch, the loss and
the norm of the gradient.
"""

import json
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from step_size import StepSize
from torch import nn


class Block(nn.Module):
    def __init__(self, size: StepSize):
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.qkv = nn.Linear(size.dim, 3 * size.dim, bias=False)
        self.out = nn.Linear(size.dim, size.dim, bias=False)
        self.norm_mlp = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.gate = nn.Linear(size.dim, size.mlp_dim, bias=False)
        self.up = nn.Linear(size.dim, size.mlp_dim, bias=False)
        self.down = nn.Linear(size.mlp_dim, size.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_attention(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        y = self.norm_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Transformer(nn.Module):
    def __init__(self, size: StepSize):
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.norm = nn.RMSNorm(size.dim, eps=size.norm_eps)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)
        frequency = size.rope_base ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
        angle = torch.arange(size.length)[:, None] * frequency
        self.register_buffer('cos', angle.cos(), persistent=False)
        self.register_buffer('sin', angle.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Training:
    def __init__(self, size: StepSize, kind: str):
        torch.manual_seed(0)
        self.model = Transformer(size)
        # The module stays what it is, so that its parameters keep their names.
        self.run = torch.compile(self.model) if kind == 'compiled' else self.model
        chosen = {} if kind == 'default' else {'fused': True}
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=size.learning_rate, weight_decay=size.weight_decay, **chosen
        )
        tokens = torch.randint(0, size.vocab, (size.batch, size.length + 1))
        self.inputs, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.run(self.inputs).flatten(0, 1), self.labels.flatten())
        loss.backward()
        return loss

    def step(self) -> float:
        loss = self.backward()
        self.optimizer.step()
        return loss.item()

    def burst(self, steps: int) -> dict[str, object]:
        seconds, cpu = [], time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
        return {'seconds': seconds, 'cpu': time.process_time() - cpu}

    def save(self, path: str) -> dict[str, object]:
        loss = self.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        arrays = {name: value.numpy() for name, value in self.model.state_dict().items()}
        results = {'loss': loss.item(), 'gradient_norm': norm.item()}
        np.savez(path, inputs=self.inputs.numpy(), labels=self.labels.numpy(), **results, **arrays)
        return results


def main(size_json: str, kind: str, threads: str) -> None:
    """Says the version, and the seconds of the first step, which compiles what is to be compiled."""
    torch.set_num_threads(int(threads))
    run, start = Training(StepSize(**json.loads(size_json)), kind), time.perf_counter()
    run.step()
    print(json.dumps({'torch': torch.__version__, 'first_step_seconds': time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split(maxsplit=1)
        result = run.burst(int(arguments[0])) if command == 'burst' else run.save(arguments[0].strip())
        print(json.dumps(result), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
