"""The kinds of statements that programs are made of, as source text.

`{a}` and `{b}` are tensors of 4×4 elements that exist, and `{t}` is the one that is
assigned. A trait says what a region is known to refuse, or how the kind touches memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Trait = Literal[
    # `{t}` shares the memory of `{a}`.
    "alias",
    # Memory of `{a}` is written.
    "writes",
    # A write that raises no version.
    "unseen",
    # Other memory is put into a tensor.
    "replaced",
    # A write that no operator makes.
    "hidden",
    # A gradient is taken through the graph of `{a}`, or of `{t}` with its hooks, which
    # may begin outside.
    "history",
    # Python's state outside of the random streams is advanced.
    "python",
    # A number in a dict of a module is.
    "counts",
]


@dataclass(frozen=True)
class Kind:
    """One kind of statement.

    Attributes:
        text: Its source.
        traits: What an engine must know of it.
        weight: How often it is drawn.
    """

    text: str
    traits: frozenset[Trait] = frozenset()
    weight: float = 1.0

    @property
    def operands(self) -> int:
        """How many tensors it reads."""
        return ("{a}" in self.text) + ("{b}" in self.text)

    @property
    def assigns(self) -> bool:
        """Whether it makes a new name."""
        return "{t}" in self.text


# Functions of `h` whose gradient autograd writes with more than one formula.
INNER = (
    *("h.prod(0)", "h.prod()", "h.cumprod(0)", "h.max()", "h.amax(0)", "h.std(0)"),
    *("h[[0, 2, 2]] ** 2", "h.gather(0, h.argsort(0)) ** 3", "h.cummax(0)[0] ** 2"),
    *("h.norm()", "h.norm(dim=0)", "h.logcumsumexp(0)", "h.sort(0)[0].cumprod(0)"),
    *("F.layer_norm(h, (4,)) ** 3", "h.softmax(0) ** 2", "h.tanh() * h", "h[1] ** 3"),
    *("torch.linalg.det(h)", "h.diff(dim=0) ** 2", "n.norm(h) ** 3", "h.median()"),
    *(
        "F.conv1d(h[None], m.weight[..., None]) ** 2",
        "m.linear(h).tanh()",
        "h * m.mean",
    ),
)

_PURE = """
{a} + 0.5 * {b}
{a} * {b}
({a} @ {b}) / 4
{a}.sin()
{a}.tanh()
(-{a}.abs()).exp()
F.gelu({a} * m.scale)
F.silu({a})
m.linear({a})
F.linear({a}, m.linear.weight.t(), m.scale)
F.layer_norm({a}, (4,), m.scale)
{a}.softmax(-1)
{a} - {a}.mean(0, keepdim=True)
{a} - {a}.max()
{a}.logsumexp(0).expand(4, 4) * {a}
torch.cat([{a}[:2], {b}[2:]])
torch.where({a} > {b}, {a}, 0.1 * {b})
{a}.sort(-1).values * {a}.topk(4, 0).values
{a} * {a}.prod(0)
{a}.sigmoid().cumprod(0)
{a}.cummax(0).values
{a}[[3, 1, 1, 0]]
{a}.gather(1, {b}.argsort(1))
{a} / (1 + {a}.std(0))
{a}.clamp(-1, 1).cumsum(1)
torch.zeros(4, 4).scatter_add(0, {b}.argsort(0), {a})
{a}.index_put((torch.tensor([1, 1, 2]),), {b}[:3], accumulate=True)
{a}.masked_fill({b} > 0, 0.5)
torch.einsum("ij,kj->ik", {a}, {b}) / 4
torch.stack({a}.unbind(1))
{a}.roll(1, 0).flip(1)
{a}.tril() + {b}.diag()
F.conv1d({a}[None], m.weight[..., None])[0]
F.scaled_dot_product_attention({a}[None], {b}[None], {a}[None])[0]
m.table({a}.argmax(1)) * {b}
m.gru({a}, {b})
{a}.double().sin().float()
{a}.bfloat16().mul(2).float()
(torch.view_as_complex({a}.reshape(4, 2, 2)) ** 2).abs().repeat(1, 2)
torch.linalg.solve({a} @ {a}.t() + 9 * torch.eye(4), {b})
{a} * torch.tensor([1.0, 2.0, 3.0, 4.0])
{a} * m.mean + torch.from_numpy(np.ones(4, np.float32))
sum([{a}, {b}, {a} * {b}])
{a}.detach() * {b}
{a} + ({a}.round() - {a}).detach()
{a} * float({b}.detach().abs().max())
{a} * {b}.detach().mean(0).tolist()[1]
Cube.apply({a})
Tanh.apply({a})
sum(Remember.apply({a}, {b}))
"""

_VIEWS = """
{a}.t()
{a}[:, :]
{a}.view(16).view(4, 4)
{a}.as_strided((4, 4), (1, 4))
{a}.unsqueeze(0).transpose(1, 2).squeeze(0)
{a}.flatten().unflatten(0, (4, 4))
{a}[0].expand(4, 4)
{a}.detach()
{a}.diagonal().expand(4, 4)
{a}.split(2)[1].repeat(2, 1)
{a}.reshape(2, 8).unbind()[0].view(2, 4).repeat(2, 1)
"""

_RANDOM = """
F.dropout({a}, 0.4)
{a} * torch.rand_like({a}) + torch.randn(4)
{a} * torch.bernoulli({a}.sigmoid().detach())
{a} * torch.empty(4, 4).uniform_()
{a} * torch.zeros(4, 4).bernoulli_(0.5)
{a}[torch.randperm(4)]
{a}[torch.multinomial({b}.detach().softmax(1), 1)[:, 0]]
F.alpha_dropout({a}, 0.3, training=True)
F.gumbel_softmax({a})
{a} * torch.rand(4, 4, generator=n.generator)
{a} * random.random()
({a} * float(np.random.standard_normal())).cos()
m.linear({a}) if random.random() < 0.5 else ({a} * {a}).sin()
"""

_WRITES = """
{a}.add_({b}, alpha=0.25)
{a}.mul_(0.75)
{a} += {b}
{a}.relu_()
{a}.sin_()
{a}.clamp_(-1, 1)
{a}.copy_({b})
{a}.zero_()
{a}.bernoulli_(0.7)
F.dropout({a}, 0.4, inplace=True)
{a}[:2].mul_(0.5)
{a}[1] = {b}[0]
{a}[{b} > 0] = 0.3
{a}.t().add_({b})
{a}.diagonal().mul_(2)
{a}.unbind(1)[0].fill_(0.2)
{a}.as_strided((4,), (5,)).sub_(1)
{a}.index_add_(0, torch.tensor([0, 2]), {b}[:2])
{a}.addcmul_({b}, {b})
F.relu({a}[2:], inplace=True)
"""


def _assigning(lines: str, weight: float, *traits: Trait) -> list[Kind]:
    texts = lines.strip().splitlines()
    each = weight / len(texts)
    return [Kind(f"{{t}} = {text}", frozenset(traits), each) for text in texts]


def _plain(lines: str, weight: float, *traits: Trait) -> list[Kind]:
    texts = lines.strip().splitlines()
    return [Kind(text, frozenset(traits), weight / len(texts)) for text in texts]


def _several(weight: float, *texts: str, traits: tuple[Trait, ...] = ()) -> list[Kind]:
    each = weight / len(texts)
    return [Kind(text.strip(), frozenset(traits), each) for text in texts]


KINDS: tuple[Kind, ...] = (
    *_assigning(_PURE, 45),
    *_assigning(_VIEWS, 10, "alias"),
    *_assigning(_RANDOM, 8),
    Kind("{t} = n.norm({a})", weight=2),
    Kind(
        '{t} = F.batch_norm({a}, m.stats["mean"], m.stats["var"], training=True)',
        frozenset({"unseen"}),
        weight=2,
    ),
    Kind("{t} = slope(lambda h: {a} * h, {b})", frozenset({"history"})),
    *[Kind(f"{{t}} = {{a}} * slope(lambda h: {f}, {{b}})", weight=0.4) for f in INNER],
    *_plain(_WRITES, 12, "writes"),
    *_several(
        2,
        "{t} = Halve.apply({a})",
        "{a}.transpose_(0, 1)\n{t} = {a} * 2",
        traits=("writes", "alias"),
    ),
    *_several(
        4,
        "m.mean.mul_(0.9).add_({a}.detach().mean(0), alpha=0.1)\n{t} = {a} - m.mean",
        "m.rebound = 0.9 * m.rebound + 0.1 * {a}.detach().mean(0)\n"
        "{t} = ({a} - m.rebound) * {a}",
        "with torch.no_grad():\n    n.norm({a})\n{t} = {a} * n.norm.running_mean",
    ),
    *_several(
        5,
        "if {a}.sum() > 0:\n    {t} = {a}.sin()\nelse:\n    {t} = {b} * {a}",
        "if {a}.sum() > 0:\n    {t} = {a}.exp().sin() * {b}\nelse:\n    {t} = {a} + 1",
        "{t} = torch.zeros(4, 4)\nfor i in {a}.sum(1).nonzero()[:, 0].tolist():\n"
        "    {t} = {t} + {b}[i].cos()",
        "{t} = {a}.clone()\nfor row in {t}.unbind():\n    row.mul_({b}[0])",
        "{t} = []\nfor row, other in zip({a}, {b}.unbind(1)):\n"
        "    {t}.append(row * other)\n{t} = torch.stack({t})",
        "try:\n    {t} = {a} @ {b}[:3]\nexcept RuntimeError:\n    {t} = {a}.cos()",
    ),
    Kind(
        "{t} = {a}\nfor _ in range(int({b}.abs().max().item() * 2) % 3):\n"
        "    {t} = ({t} * 1.5).sin()",
        frozenset({"alias"}),
    ),
    Kind(
        "{t} = {a} * 1\nif {t}.requires_grad:\n"
        "    {t}.register_hook(lambda grad: grad * 2)",
        frozenset({"history"}),
    ),
    *_several(
        5,
        "with torch.no_grad():\n    {t} = m.linear({a}).softmax(-1)\n{t} = {t} * {b}",
        "{t} = {a}.detach().requires_grad_()\n"
        "{t} = {a} * torch.autograd.grad({t}.prod(0).sin().sum(), {t})[0]",
        "{t} = torch.empty(4, 4)\nwith torch.no_grad():\n"
        "    torch.mul({a}, {b}, out={t})\n{t} = {t} * {a}",
        "{t} = torch.utils.checkpoint.checkpoint(\n"
        "    lambda a: F.dropout(a.sin(), 0.3).exp(), {a}, use_reentrant=False\n)",
    ),
    *_several(
        3,
        "m.codebook.data[:4].mul_(0.5).add_({a}.detach())\n{t} = {a} * m.codebook[:4]",
        "m.mean.data.mul_(0.9)\n{t} = {a} * m.mean",
        "m.scale.data.mul_(0.9)\n{t} = {a} * m.scale",
        "{t} = {a} * 2\n{t}.data.mul_({b}.detach())",
        "{t} = {a}.tanh()\n{t}.data.mul_({b}.detach())",
        traits=("unseen",),
    ),
    *_several(
        1,
        "m.scale.data = m.scale.data * 0.5 + {a}.detach().mean(0)\n{t} = {a} * m.scale",
        "{t} = {a} * 2\n{t}.data = {b}.detach().clone()",
        traits=("replaced",),
    ),
    Kind("{t} = {a} * 2\n{t}.detach().clamp_(-1, 1)"),
    *_several(
        1.5,
        "{t} = {a} * 2\n{t}.detach().numpy()[0] *= 3",
        "if {a}.sum() > 0:\n    {t} = {b} * 2\n    {t}.detach().numpy()[0] *= 3\n"
        "    {t} = {t}.sin()\nelse:\n    {t} = {b} * {a}",
        "{t} = torch.zeros(4)\nnp.copyto({t}.numpy(), {a}.detach().numpy()[0])\n"
        "{t} = {t} * {b}",
        traits=("hidden",),
    ),
    *_several(
        2,
        "m.seen += 1\n{t} = {a} * m.seen",
        "({a}.detach() * m.scale).exp().sum().backward()\n{t} = {a} * m.scale.grad",
        traits=("python",),
    ),
    *_several(
        1,
        "m.stats['calls'] = m.stats.get('calls', 0) + 1\n{t} = {a} / m.stats['calls']",
        traits=("python", "counts"),
    ),
)
