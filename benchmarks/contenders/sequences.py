"""The networks of J6 and J7 as one usually writes them: LEAF's LSTM, and a small GPT with LoRA in its attention."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHARACTERS, WINDOW, WIDTH, HEADS, BLOCKS, RANK, ALPHA = 80, 80, 128, 4, 5, 8, 16


class Characters(nn.Module):
    """817,872 parameters. As in LEAF a layer has one bias, so torch's second one stays 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, CHARACTERS)
        for bias in (self.lstm.bias_hh_l0, self.lstm.bias_hh_l1):
            nn.init.zeros_(bias).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden[:, -1])


def characters() -> list[nn.Module]:
    return [Characters()]


class Lora(nn.Module):
    """A frozen linear layer W with W x + (α/r) B(A x)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.a, self.b = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + ALPHA / RANK * self.b(self.a(x))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = Lora(WIDTH, 3 * WIDTH), Lora(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """1,022,336 frozen parameters and 30,720 of adapters. Returns logits as (N, classes, T), for torch's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(WINDOW, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".a.weight", ".b.weight")))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens.clamp(min=0)) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x))).transpose(1, 2)


def adapted_gpt() -> list[nn.Module]:
    return [Gpt()]
