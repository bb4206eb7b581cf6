"""Common modules, seeded and tiny: each is built with its example batch by a function of its own, and gives its mean loss."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

Batch = dict[str, Tensor]
B, D, T, V = 4, 8, 6, 13  # samples, width, positions, words
MODULES: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {}
"""Those that train as in plain torch."""
REFUSED: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], str]] = {}
"""Those that a graph cannot hold, each with words of the sentence that says so."""


class Of(nn.Module):
    """Parts by name, and a function of them and the batch."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.run(self, x, y)


def rows(*shape: int) -> Tensor:
    return torch.randn(B, *shape)


def ids(*shape: int) -> Tensor:
    return torch.randint(0, V, (B, *shape))


def add(
    name: str,
    run: Callable[..., Any],
    x: Callable[[], Tensor],
    y: Callable[[], Tensor],
    refused: str = "",
    **parts: Any,
) -> None:
    """`parts`: functions that make them, called after seeding."""

    def make() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        return Of(run, **{key: part() for key, part in parts.items()}), {"x": x(), "y": y()}

    if refused:
        REFUSED[name] = make, refused
    else:
        MODULES[name] = make


def linear(before: int = D, after: int = D) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(before, after)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


def classes() -> Tensor:
    return torch.randint(0, D, (B,))


def real() -> Tensor:
    return rows(D)


def image() -> Tensor:
    return rows(3, 8, 8)


def seq() -> Tensor:
    return rows(T, D)


def mse(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(m.net(x), y)


def ce(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(m.head(m.net(x).flatten(1)), y)


def text(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(m.head(m.net(m.embed(x))).flatten(0, -2), y.flatten())


def words(**parts: Any) -> dict[str, Any]:
    return {"embed": lambda: nn.Embedding(V, D), "head": linear(D, V), **parts}


def on_values(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Two layers around a function."""
    return lambda m, x, y: functional.mse_loss(m.second(function(m.first(x))), y)


def plain(name: str, function: Callable[[Tensor], Tensor], refused: str = "", after: int = D) -> None:
    add(name, on_values(function), real, real, refused, first=linear(), second=linear(after))


# -- layers

add("mlp", mse, real, real, net=net)
add("classifier", ce, real, classes, net=net, head=linear())
for activation in ("LeakyReLU", "Mish", "GLU", "RReLU"):
    plain(f"activation {activation}", getattr(nn, activation)(), after=D // 2 if activation == "GLU" else D)
add("activation PReLU", mse, real, real, net=lambda: nn.Sequential(nn.Linear(D, D), nn.PReLU(), nn.Linear(D, D)))
add("conv1d", ce, seq, classes, net=lambda: nn.Conv1d(T, 5, 3), head=linear(30))
add(
    "conv2d",
    ce,
    image,
    classes,
    net=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
    head=linear(36),
)
add("conv3d", ce, lambda: rows(2, 4, 4, 4), classes, net=lambda: nn.Conv3d(2, 2, 3), head=linear(16))
add("conv transpose", mse, lambda: rows(3, 4, 4), image, net=lambda: nn.ConvTranspose2d(3, 3, 2, stride=2))
add(
    "grouped dilated conv",
    ce,
    lambda: rows(4, 8, 8),
    classes,
    net=lambda: nn.Conv2d(4, 4, 3, groups=4, dilation=2, padding_mode="circular", padding=1),
    head=linear(144),
)
add(
    "batch norm",
    ce,
    image,
    classes,
    net=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
    head=linear(144),
)
add("batch norm 1d", mse, real, real, net=lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)))
add(
    "instance norm",
    ce,
    image,
    classes,
    net=lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.Conv2d(3, 2, 3)),
    head=linear(72),
)
add(
    "instance norm with statistics",
    ce,
    image,
    classes,
    net=lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True), nn.Conv2d(3, 2, 3)),
    head=linear(72),
)
add(
    "group norm",
    ce,
    image,
    classes,
    net=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
    head=linear(144),
)
add("layer norm", mse, real, real, net=lambda: nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, D)))
add("rms norm", mse, real, real, net=lambda: nn.Sequential(nn.Linear(D, D), nn.RMSNorm(D), nn.Linear(D, D)))
add(
    "local response norm",
    ce,
    image,
    classes,
    net=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.LocalResponseNorm(2)),
    head=linear(144),
)
add("weight norm", mse, real, real, net=lambda: parametrizations.weight_norm(nn.Linear(D, D)))
add("old weight norm", mse, real, real, net=lambda: nn.utils.weight_norm(nn.Linear(D, D)))
add("spectral norm", mse, real, real, net=lambda: parametrizations.spectral_norm(nn.Linear(D, D)))
add("old spectral norm", mse, real, real, net=lambda: nn.utils.spectral_norm(nn.Linear(D, D)))
add(
    "orthogonal", mse, real, real, net=lambda: parametrizations.orthogonal(nn.Linear(D, D), orthogonal_map="matrix_exp")
)
add("orthogonal by householder", mse, real, real, net=lambda: parametrizations.orthogonal(nn.Linear(D, D)))
add(
    "orthogonal by cayley",
    mse,
    real,
    real,
    net=lambda: parametrizations.orthogonal(nn.Linear(D, D), orthogonal_map="cayley"),
)
add(
    "bilinear",
    lambda m, x, y: functional.mse_loss(m.net(x, torch.tanh(x)), y),
    real,
    real,
    net=lambda: nn.Bilinear(D, D, D),
)
for dropout in ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout"):
    shape = {
        "Dropout1d": (3, 4),
        "Dropout2d": (3, 4, 4),
        "Dropout3d": (3, 2, 2, 2),
        "FeatureAlphaDropout": (3, 4, 4),
    }.get(dropout, (D,))
    add(
        f"layer {dropout}",
        ce,
        lambda shape=shape: rows(*shape),
        classes,
        net=lambda kind=dropout, last=shape[-1]: nn.Sequential(nn.Linear(last, last), getattr(nn, kind)(0.3)),
        head=linear(math.prod(shape)),
    )
for module in ("LSTM", "GRU", "RNN"):
    add(
        f"recurrent {module}",
        lambda m, x, y: ce(m, x, y),
        seq,
        classes,
        net=lambda kind=module: nn.Sequential(getattr(nn, kind)(D, 5, batch_first=True), _First()),
        head=linear(30),
    )
add(
    "two-way LSTM of two layers",
    ce,
    seq,
    classes,
    net=lambda: nn.Sequential(nn.LSTM(D, 5, 2, batch_first=True, bidirectional=True), _First()),
    head=linear(60),
)
add(
    "LSTM with projection",
    ce,
    seq,
    classes,
    net=lambda: nn.Sequential(nn.LSTM(D, 5, batch_first=True, proj_size=3), _First()),
    head=linear(18),
)


class _First(nn.Module):
    def forward(self, outputs: Any) -> Tensor:
        kept: Tensor = outputs[0]
        return kept


class Cells(nn.Module):
    """A cell over time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell = getattr(nn, kind)(D, D)

    def forward(self, x: Tensor) -> Tensor:
        state, states = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(states, 1)


for cell in ("LSTMCell", "GRUCell", "RNNCell"):
    add(f"over time {cell}", ce, seq, classes, net=lambda kind=cell: Cells(kind), head=linear(T * D))

# -- attention and text

add("embedding", text, lambda: ids(T), lambda: ids(T), **words(net=net))
add(
    "embedding with padding",
    text,
    lambda: ids(T),
    lambda: ids(T),
    **words(net=net, embed=lambda: nn.Embedding(V, D, padding_idx=0)),
)
add(
    "embedding bag",
    lambda m, x, y: functional.cross_entropy(m.head(m.bag(x)), y),
    lambda: ids(T),
    classes,
    bag=lambda: nn.EmbeddingBag(V, D),
    head=linear(),
)
add(
    "tied embedding",
    lambda m, x, y: functional.cross_entropy((m.net(m.embed(x)) @ m.embed.weight.T).flatten(0, 1), y.flatten()),
    lambda: ids(T),
    lambda: ids(T),
    embed=lambda: nn.Embedding(V, D),
    net=net,
)
add(
    "encoder layer",
    text,
    lambda: ids(T),
    lambda: ids(T),
    **words(net=lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)),
)
add(
    "encoder, norm first",
    text,
    lambda: ids(T),
    lambda: ids(T),
    **words(
        net=lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True, norm_first=True), 2, enable_nested_tensor=False
        )
    ),
)
add(
    "encoder with dropout",
    text,
    lambda: ids(T),
    lambda: ids(T),
    **words(net=lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.1, batch_first=True)),
)
add(
    "decoder",
    lambda m, x, y: functional.cross_entropy(m.head(m.net(m.embed(x), m.embed(y))).flatten(0, 1), y.flatten()),
    lambda: ids(T),
    lambda: ids(T),
    **words(net=lambda: nn.TransformerDecoderLayer(D, 2, 16, 0.0, batch_first=True)),
)
add(
    "encoder and decoder",
    lambda m, x, y: functional.cross_entropy(
        m.head(
            m.net(
                m.embed(x),
                m.embed(y[:, :-1]),
                tgt_is_causal=True,
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(T - 1),
            )
        ).flatten(0, 1),
        y[:, 1:].flatten(),
    ),
    lambda: ids(T),
    lambda: ids(T),
    **words(net=lambda: nn.Transformer(D, 2, 1, 1, 16, 0.0, batch_first=True)),
)
add(
    "attention by hand",
    lambda m, x, y: functional.mse_loss(
        m.out(torch.softmax(m.q(x) @ m.k(x).transpose(1, 2) / math.sqrt(D), -1) @ m.v(x)), y
    ),
    seq,
    seq,
    q=linear(),
    k=linear(),
    v=linear(),
    out=linear(),
)
add(
    "multi-head attention",
    lambda m, x, y: functional.mse_loss(m.net(x, x, x)[0], y),
    seq,
    seq,
    net=lambda: nn.MultiheadAttention(D, 2, batch_first=True),
)
add(
    "causal attention",
    lambda m, x, y: functional.mse_loss(
        functional.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), is_causal=True), y
    ),
    seq,
    seq,
    q=linear(),
    k=linear(),
    v=linear(),
)
add(
    "attention with padding",
    lambda m, x, y: functional.cross_entropy(
        m.head(m.net(m.embed(x), src_key_padding_mask=x == 0)).flatten(0, 1), y.flatten(), ignore_index=0
    ),
    lambda: ids(T),
    lambda: ids(T),
    **words(net=lambda: nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)),
)
add(
    "rotary positions",
    lambda m, x, y: functional.mse_loss(m.net(_turned(m.first(x))), y),
    seq,
    seq,
    first=linear(),
    net=linear(),
)


def _turned(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[1])[:, None] * 0.1 ** torch.arange(x.shape[2] // 2)
    left, right = x.chunk(2, -1)
    return torch.cat((left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()), -1)


def _as_complex(x: Tensor) -> Tensor:
    turns = torch.polar(torch.ones(D // 2), torch.arange(D // 2) * 0.3)
    return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * turns).flatten(-2)


add("rotary positions as complex numbers", on_values(_as_complex), seq, seq, first=linear(), second=linear())
add(
    "label conditioning",
    lambda m, x, y: functional.cross_entropy(m.head(m.net(x) + m.embed(y)), y),
    real,
    classes,
    net=net,
    embed=lambda: nn.Embedding(D, D),
    head=linear(),
)
add("autoencoder", lambda m, x, y: functional.mse_loss(m.net(x), x) + 0 * y.mean(), real, real, net=net)
add(
    "variational autoencoder",
    lambda m, x, y: _vae(m, x),
    real,
    real,
    net=net,
    mean=linear(),
    spread=linear(),
    back=linear(),
)


def _vae(m: Any, x: Tensor) -> Tensor:
    h = m.net(x)
    mean, spread = m.mean(h), m.spread(h)
    drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
    return functional.mse_loss(m.back(drawn), x) - 0.5 * (1 + spread - mean**2 - spread.exp()).mean()


# -- losses

add("huber", lambda m, x, y: functional.huber_loss(m.net(x), y), real, real, net=net)
add("smooth l1", lambda m, x, y: functional.smooth_l1_loss(m.net(x), y), real, real, net=net)
add(
    "bce with logits",
    lambda m, x, y: functional.binary_cross_entropy_with_logits(m.net(x), (y > 0).float()),
    real,
    real,
    net=net,
)
add(
    "bce",
    lambda m, x, y: functional.binary_cross_entropy(torch.sigmoid(m.net(x)), (y > 0).float()),
    real,
    real,
    net=net,
)
add(
    "kl",
    lambda m, x, y: functional.kl_div(m.net(x).log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    real,
    real,
    net=net,
)
add("nll", lambda m, x, y: functional.nll_loss(m.net(x).log_softmax(-1), y), real, classes, net=net)
add(
    "label smoothing",
    lambda m, x, y: functional.cross_entropy(m.net(x), y, label_smoothing=0.1),
    real,
    classes,
    net=net,
)
add(
    "weighted classes",
    lambda m, x, y: functional.cross_entropy(m.net(x), y, weight=m.weight),
    real,
    classes,
    net=net,
    weight=lambda: torch.rand(D),
)
add("focal", lambda m, x, y: _focal(functional.cross_entropy(m.net(x), y, reduction="none")), real, classes, net=net)
add("triplet", lambda m, x, y: functional.triplet_margin_loss(m.net(x), m.net(y), m.net(x + y)), real, real, net=net)
add(
    "cosine", lambda m, x, y: functional.cosine_embedding_loss(m.net(x), y, torch.ones(x.shape[0])), real, real, net=net
)
add(
    "in-batch contrast",
    lambda m, x, y: functional.cross_entropy(
        functional.normalize(m.net(x)) @ functional.normalize(m.net(y)).T, torch.arange(x.shape[0])
    ),
    real,
    real,
    net=net,
)
add(
    "ctc",
    lambda m, x, y: functional.ctc_loss(
        m.net(x).log_softmax(-1).transpose(0, 1), y, torch.full((x.shape[0],), T), torch.full((x.shape[0],), 2)
    ),
    seq,
    lambda: torch.randint(1, D, (B, 2)),
    net=net,
)
add(
    "gaussian nll",
    lambda m, x, y: functional.gaussian_nll_loss(m.net(x), y, m.spread(x).exp()),
    real,
    real,
    net=net,
    spread=linear(),
)
add("poisson nll", lambda m, x, y: functional.poisson_nll_loss(m.net(x), y.abs()), real, real, net=net)
add(
    "multi-label margin",
    lambda m, x, y: functional.multilabel_soft_margin_loss(m.net(x), (y > 0).float()),
    real,
    real,
    net=net,
)
add("loss in a dict", lambda m, x, y: {"logits": m.net(x), "loss": mse(m, x, y)}, real, real, net=net)
add("loss in a tuple", lambda m, x, y: (mse(m, x, y), m.net(x)), real, real, net=net)


def _focal(loss: Tensor) -> Tensor:
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


# -- control, writing in place, views


def _sliced(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 2:5] = torch.tanh(x[:, :3])
    return y


def _in_place(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = 0
    y[:, 1] += x[:, 2]
    y.mul_(2).clamp_(-3, 3)
    return y


def _filled(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], 2 * D)
    out[:, ::2] = x
    out[:, 1::2] = x.roll(1, -1)
    return out[:, :D] + out[:, D:]


def _guarded(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return x


def _asserted(x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return x


def _clamped(x: Tensor) -> Tensor:
    if torch.isinf(x).any() or torch.isnan(x).any():
        x = torch.clamp(x, -1e3, 1e3)
    return x


plain("slice assigned", _sliced)
plain("written in place", _in_place)
plain("filled in", _filled)
plain("masked write", lambda x: x.clone().masked_fill_(x > 1, 0.5))
plain("guard of finite numbers", _guarded)
plain("assert of finite numbers", _asserted)
plain("clamp where infinite", _clamped)
plain("list of one", lambda x: torch.cat([x.chunk(1)[0], x.split(D, 1)[0], x[:, None].unbind(1)[0]]).chunk(3)[0])
plain("chunk one", lambda x: x.chunk(1, 1)[0])
plain("unbind one", lambda x: x[:, None].unbind(1)[0])
plain("split one", lambda x: torch.split(x, [D], 1)[0])
plain("top k", lambda x: x.topk(3).values.sum(-1, keepdim=True) + x)
plain("sorted", lambda x: x.sort(-1).values)
plain("cumulated", lambda x: x.cumsum(-1))
plain("einsum", lambda x: torch.einsum("bi,bj->bij", x, x).mean(1))
plain("gathered", lambda x: x.gather(1, x.argsort(1)))
plain("where", lambda x: torch.where(x > 0, x, 0.1 * x))
plain("no gradient", lambda x: x + x.detach() * 2)
plain("straight through", lambda x: x + (x.round() - x).detach())
plain("fourier", lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=D))
plain("fourier of two dimensions", lambda x: torch.fft.fft2(x.reshape(-1, 2, 4)).real.flatten(1))
plain("block diagonal", lambda x: x @ torch.block_diag(torch.eye(4), 2 * torch.eye(4)))
plain("matrix exponential", lambda x: x @ torch.matrix_exp(0.1 * (x.T @ x)))
plain("inverse", lambda x: x @ torch.linalg.inv(torch.eye(D) * 3 + 0.1 * x.T @ x))
plain("solved", lambda x: torch.linalg.solve(torch.eye(D) * 3 + 0.1 * x.T @ x, x.T).T)
plain("cholesky", lambda x: x @ torch.linalg.cholesky(torch.eye(D) * 3 + 0.1 * x.T @ x))
plain("determinant", lambda x: x * torch.linalg.slogdet(torch.eye(D) * 3 + 0.1 * x.T @ x)[1])
plain("qr", lambda x: x @ torch.linalg.qr(torch.eye(D) * 3 + 0.1 * x.T @ x)[0])
plain("eigenvalues", lambda x: x * torch.linalg.eigvalsh(torch.eye(D) * 3 + 0.1 * x.T @ x))
plain("singular values", lambda x: x * torch.linalg.svdvals(torch.eye(D) * 3 + 0.1 * x.T @ x))
plain("normal draws", lambda x: x + torch.normal(torch.zeros_like(x), 0.1))
plain("noise in place", lambda x: x + torch.empty_like(x).normal_(0, 0.1))
plain("uniform noise", lambda x: x + torch.empty_like(x).uniform_(-0.1, 0.1))
plain("gumbel softmax", lambda x: functional.gumbel_softmax(x))
plain("hard gumbel softmax", lambda x: functional.gumbel_softmax(x, hard=True))
plain("stochastic depth", lambda x: x + torch.tanh(x) * x.new_empty(x.shape[0], 1).bernoulli_(0.7) / 0.7)
plain("binary mask", lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)))


def _mixture(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Experts, each on the rows that are routed to it, by masks."""
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    total = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        share = (weights * (chosen == number)).sum(-1, keepdim=True)
        total = total + share * expert(x)
    return functional.mse_loss(total, y)


def _routed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Experts, each on the rows that are routed to it, by indices."""
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    total = torch.zeros_like(x)
    for number, expert in enumerate(m.experts):
        row, place = torch.where(chosen == number)
        total.index_add_(0, row, expert(x[row]) * weights[row, place, None])
    return functional.mse_loss(total, y)


def _sorted_experts(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Experts by sorting rows and counting them."""
    weights, chosen = m.gate(x).softmax(-1).topk(2)
    flat = chosen.flatten()
    order = flat.argsort()
    counts = torch.histc(flat.float(), bins=3, min=0, max=2)
    ends = counts.cumsum(0)
    outputs = torch.stack([expert(x) for expert in m.experts], 1)
    picked = outputs[order // 2, flat[order]] * weights.flatten()[order, None]
    return functional.mse_loss(torch.zeros_like(x).index_add(0, order // 2, picked), y) + 0 * ends.sum()


def experts() -> nn.Module:
    return nn.ModuleList(nn.Linear(D, D) for _ in range(3))


add("mixture of experts", _mixture, real, real, gate=linear(D, 3), experts=experts)
add("experts by sorting", _sorted_experts, real, real, gate=linear(D, 3), experts=experts)
add(
    "checkpointed",
    lambda m, x, y: functional.mse_loss(m.last(checkpoint(m.net, m.first(x), use_reentrant=False)), y),
    real,
    real,
    first=linear(),
    net=net,
    last=linear(),
)
add(
    "reentrant checkpoint",
    lambda m, x, y: functional.mse_loss(m.last(checkpoint(m.net, m.first(x), use_reentrant=True)), y),
    real,
    real,
    first=linear(),
    net=net,
    last=linear(),
)
add(
    "frozen part",
    lambda m, x, y: functional.mse_loss(m.last(m.net(x)), y),
    real,
    real,
    net=lambda: net().requires_grad_(False),
    last=linear(),
)
add(
    "residual gate of zero",
    lambda m, x, y: functional.mse_loss(x + m.gate * m.net(x), y),
    real,
    real,
    net=net,
    gate=lambda: nn.Parameter(torch.zeros(1)),
)
add("shared layer", lambda m, x, y: functional.mse_loss(m.net(m.net(m.net(x))), y), real, real, net=net)
add(
    "pixel shuffle",
    mse,
    lambda: rows(3, 4, 4),
    image,
    net=lambda: nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2)),
)
add(
    "adaptive pooling",
    ce,
    image,
    classes,
    net=lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(2)),
    head=linear(16),
)
add(
    "upsampling",
    mse,
    lambda: rows(3, 4, 4),
    image,
    net=lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Upsample(scale_factor=2, mode="bilinear")),
)
add(
    "grid sample",
    lambda m, x, y: functional.mse_loss(
        functional.grid_sample(x, functional.affine_grid(m.net(x.flatten(1)).view(-1, 2, 3), list(x.shape))), y
    ),
    image,
    image,
    net=linear(192, 6),
)


# -- lost in tracing


class Doubled(torch.autograd.Function):
    """A gradient that is not its value's."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Squared(torch.autograd.Function):
    """The right gradient, by hand."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return 2 * x * gradient


class Clipped(torch.autograd.Function):
    """Gradients above one are cut."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def _hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return x


def _inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        factor = torch.tanh(x).mean()
    return x * factor.clone()


def _by_data(x: Tensor) -> Tensor:
    y = x * 1
    y.data = torch.tanh(y.data)
    return y


def _backward_hooked() -> nn.Module:
    module = nn.Linear(D, D)
    module.register_full_backward_hook(lambda _module, inputs, _outputs: tuple(2 * g for g in inputs if g is not None))
    return module


def _parameter_hooked() -> nn.Module:
    module = nn.Linear(D, D)
    module.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return module


plain("own function, right", Squared.apply)
plain("own function, wrong", Doubled.apply, "autograd.Function")
plain("own function, clipped", Clipped.apply, "autograd.Function")
plain("own function, straight through", Rounded.apply, "autograd.Function")
plain("tensor hook", _hooked, "hook")
plain("inference mode", _inferred)
plain("data", lambda x: x.data * 2 + x)
plain("data replaced", _by_data, "data")
add(
    "module backward hook",
    lambda m, x, y: functional.mse_loss(m.second(m.first(x)), y),
    real,
    real,
    "hook",
    first=_backward_hooked,
    second=linear(),
)
add(
    "parameter hook",
    lambda m, x, y: functional.mse_loss(m.second(m.first(x)), y),
    real,
    real,
    "hook",
    first=_parameter_hooked,
    second=linear(),
)
plain("rows by a mask", lambda x: x[x.sum(-1) > 0].mean(0, keepdim=True) + x, "x[x.sum(-1) > 0]")
add("routed experts", _routed, real, real, "torch.where(chosen == number)", gate=linear(D, 3), experts=experts)
add("sum over the batch", lambda m, x, y: functional.mse_loss(m.net(x), y, reduction="sum"), real, real, "sum", net=net)
add(
    "float64",
    lambda m, x, y: functional.mse_loss(m.net(x.double()).float(), y),
    real,
    real,
    "float64",
    net=lambda: net().double(),
)


# -- more of what people write


def alone(name: str, module: Callable[[], nn.Module], batch: Callable[[], Batch], refused: str = "") -> None:
    """A module with arguments of its own."""

    def make() -> tuple[nn.Module, Batch]:
        torch.manual_seed(0)
        return module(), batch()

    if refused:
        REFUSED[name] = make, refused
    else:
        MODULES[name] = make


class Masked(nn.Module):
    """Attention with a mask of positions and one of padding, whose weights are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, 0.1, batch_first=True, add_bias_kv=True)

    def forward(self, x: Tensor, padding: Tensor, *, y: Tensor, scale: Tensor | None = None) -> Tensor:
        later = torch.triu(torch.full((T, T), float("-inf")), 1)
        out, weights = self.attention(x, x, x, key_padding_mask=padding, attn_mask=later)
        return functional.mse_loss(out if scale is None else out * scale, y) + weights.var()


def padding() -> Tensor:
    return torch.arange(T).expand(B, T) >= torch.tensor([6, 5, 4, 3])[:, None]


class Packed(nn.Module):
    """An LSTM over rows of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(D, D, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.net(packed)[0].data.square().mean()


class Averaged(nn.Module):
    """Buffers that move: an average with its correction, or one that is assigned anew."""

    def __init__(self, *, assigned: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(D, D)
        self.assigned = assigned
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.net(x)
        if self.assigned:
            self.mean = (0.9 * self.mean + 0.1 * h.mean(0)).detach()
            return functional.mse_loss(h - self.mean, y)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.count += 1
        return functional.mse_loss(h - self.mean / (1 - 0.9 ** self.count.float()), y)


class Twice(nn.Module):
    """Remembers how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(D, D), 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return functional.mse_loss(self.net(x) * (1 + 0.1 * self.calls), y)


def tied() -> nn.Module:
    first, middle, last = (nn.Linear(D, D) for _ in range(3))
    last.weight, last.bias = first.weight, middle.bias
    return nn.Sequential(first, nn.ReLU(), middle, nn.ReLU(), last)


def _by_head(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], T, heads, -1).transpose(1, 2)


def _placed(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0])
    z = torch.zeros_like(x)
    z[rows, rows % D] = x[:, 0]
    z.index_put_((rows, rows % 3), x[:, 1], accumulate=True)
    return z + x


def _by_views(x: Tensor) -> Tensor:
    y = x.clone()
    view = y[:, ::2]
    view.copy_(view.tanh())
    view += 1
    y.t()[1].zero_()
    y[:, [2, 3]] = y[:, [3, 2]]
    y[..., -1] = y[..., 0] * 2
    return y


def _reduced(x: Tensor) -> Tensor:
    pairs = (torch.arange(D) // 2).expand(x.shape[0], D)
    largest = torch.zeros_like(x).scatter_reduce(1, pairs, x, "amax", include_self=False)
    return (
        largest
        + torch.ones_like(x).scatter_reduce(1, pairs, x, "prod")
        + torch.zeros_like(x).scatter_reduce(1, pairs, x, "mean")
    )


def _quantised(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """A vector-quantised autoencoder."""
    z = m.net(x)
    nearest = m.book[torch.cdist(z, m.book).argmin(1)]
    loss = functional.mse_loss(nearest, z.detach()) + 0.25 * functional.mse_loss(z, nearest.detach())
    return functional.mse_loss(m.back(z + (nearest - z).detach()), y) + loss


def _in_bfloat16(m: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        h = m.net(x)
    return functional.mse_loss(h.float(), y)


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return functional.dropout(x, 0.3)


def _cut(x: Tensor) -> Tensor:
    return x.clone().sqrt_().sigmoid_()


def _doubled_and_mixed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    share, order = torch.rand(()), torch.randperm(x.shape[0])
    return functional.mse_loss(m.net(share * x + (1 - share) * x[order]), share * y + (1 - share) * y[order])


def _drawn_normal(m: Any, x: Tensor, y: Tensor) -> Tensor:
    found = torch.distributions.Normal(m.net(x), m.spread(x).exp())
    return functional.mse_loss(found.rsample(), y) - found.log_prob(y).mean()


def _penalty(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_(True)
    return mse(m, x, y) + torch.autograd.grad(m.net(x).sum(), x, create_graph=True)[0].square().mean()


alone("attention, masked twice", Masked, lambda: {"x": seq(), "padding": padding(), "y": seq()})
alone("moving average", Averaged, lambda: {"x": real(), "y": real()})
add("tied weights", mse, real, real, net=tied)
add("bag of weighted words", lambda m, x, y: functional.cross_entropy(
    functional.embedding_bag(
        x.flatten(), m.embed.weight, torch.arange(0, x.numel(), T), mode="sum", per_sample_weights=m.share[x.flatten()]
    ), y,
), lambda: ids(T), classes, embed=lambda: nn.Embedding(V, D), share=lambda: nn.Parameter(torch.rand(V)))  # fmt: skip
for option in ("sparse", "scale_grad_by_freq"):
    add(f"embedding, {option}", lambda m, x, y: functional.cross_entropy(m.embed(x).mean(1), y), lambda: ids(T), classes,
        embed=lambda option=option: nn.Embedding(V, D, **{option: True}))  # fmt: skip
add("attention by groups of heads", lambda m, x, y: functional.mse_loss(functional.scaled_dot_product_attention(
    _by_head(m.q(x), 4), _by_head(m.k(x), 2), _by_head(m.v(x), 2), is_causal=True, scale=0.3, enable_gqa=True,
).transpose(1, 2).flatten(2), y), seq, seq, q=linear(), k=linear(D, 4), v=linear(D, 4))  # fmt: skip
plain("placed by indices", _placed)
plain("written through views", _by_views)
plain("scattered and reduced", _reduced)
plain("cumulated products", lambda x: x.cumprod(-1) + x.logcumsumexp(-1) + x.cummax(-1).values)
add("vector-quantised", _quantised, real, real, net=net, book=lambda: nn.Parameter(torch.randn(5, D)), back=linear())
add("autocast inside", _in_bfloat16, real, real, net=net)
add("float64 inside", lambda m, x, y: functional.mse_loss((m.net(x).double() * m.factor).float(), y), real, real, net=net,
    factor=lambda: torch.randn(D, dtype=torch.float64))  # fmt: skip
add("loss of one element", lambda m, x, y: mse(m, x, y)[None], real, real, net=net)
add("loss in bfloat16", lambda m, x, y: mse(m, x, y).bfloat16(), real, real, net=net)
add("nothing kept of a batch", mse, real, real,
    net=lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False, track_running_stats=False), net()))  # fmt: skip
add("mixed samples", _doubled_and_mixed, real, real, net=net)
add("drawn and judged by a distribution", _drawn_normal, real, real, net=net, spread=linear())
add("compiled", mse, real, real, net=lambda: torch.compile(net(), backend="eager"))
add("dropout in a reentrant checkpoint", lambda m, x, y: functional.mse_loss(checkpoint(m.net, m.first(x), use_reentrant=True), y),
    real, real, first=linear(), net=lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout(0.2), nn.Linear(D, D)))  # fmt: skip
add("unused and partly frozen", mse, real, real, unused=linear(),
    net=lambda: nn.Sequential(nn.Linear(D, D).requires_grad_(False), nn.Linear(D, D)))  # fmt: skip

alone("packed rows", Packed, lambda: {"x": seq(), "lengths": torch.tensor([6, 3, 4, 2])}, "packed by their lengths")
alone("counts its calls", Twice, lambda: {"x": real(), "y": real()}, "differs from pass to pass")
alone(
    "average assigned anew",
    lambda: Averaged(assigned=True),
    lambda: {"x": real(), "y": real()},
    "differs from pass to pass",
)
plain("seeded anew", _seeded, "leave torch.manual_seed out")
plain("drawn by Python", lambda x: x * random.random(), "draw by torch.rand")
plain("changed before it goes back", _cut, "its own backward pass fails")
add("penalty of gradients", _penalty, real, real, "no backward pass of its own", net=net)
add("input written over", lambda m, x, y: mse(m, x.mul_(2), y), real, real, "changes x, which is not a buffer", net=net)
add("complex parameter", lambda m, x, y: functional.mse_loss((torch.fft.fft(m.net(x)) * m.factor).real, y), real, real,
    "factor is complex64", net=net, factor=lambda: nn.Parameter(torch.randn(D, dtype=torch.complex64)))  # fmt: skip
plain("by its values", lambda x: x if x.sum() > 0 else -x, "must not depend on the values")
