"""What stands around the statements of a program: blocks, and how a step goes on."""

from __future__ import annotations

from typing import NamedTuple

# Blocks of statements: `with`, `if` and `for`. A region is a block of its own kind.
BLOCKS = (
    "with torch.no_grad():",
    "with torch.autocast('cpu', torch.bfloat16):",
    "with identity_hooks():",
    "with offload_hooks():",
    "with save_on_cpu():",
    "with torch.random.fork_rng():",
    "for _ in range(2):",
    "for _ in range(int({a}.abs().max().item()) % 2 + 1):",
    "if {a}.sum() > 0:",
)


class Between(NamedTuple):
    """What happens between forward and backward.

    Attributes:
        text: Its source.
        reason: Why a region may refuse it; empty if it may not.
        reading: A statement that reads what is changed, drawn oftener then.
    """

    text: str
    reason: str = ""
    reading: str = ""


_LINEAR = "{t} = m.linear({a}).sin()"
_SCALE = "{t} = ({a} * m.scale).sin()"
_MEAN = "{t} = ({a} * m.stats['mean'] + m.stats['mean']).sin()"
_ENTRIES = "{t} = ({a} * m.entries[0] + m.entries[1]).sin()"
_SHIFT = "{t} = ({a} * shelf['shift'] - shelf['shift']).sin()"
_CLOSURE = "{t} = ({a} * y.detach() + y).sin()"

BETWEEN = (
    Between("m.scale.data = m.scale.data * 0.5", "replaced"),
    Between("m.linear.weight.data = m.linear.weight.data.clone()", "replaced"),
    Between("m.scale.data.mul_(0.5)", "unseen between"),
    Between("m.codebook.data.mul_(0.5)", "unseen between"),
    Between("m.mean.add_(1)", "written since"),
    Between("n.norm.running_mean.zero_()", "written since"),
    Between("n.norm(x.detach())", "written since"),
    Between("n.eval()"),
    Between("m.seen += 1"),
    Between("m.rebound = m.rebound * 2"),
)

# Names that are bound to something else. The outputs keep what a name was bound to,
# because that is where the gradients go.
BINDINGS = (
    Between("m.factor *= 2", reading="{t} = ({a} * m.factor).sin()"),
    Between(
        "m.stats['factor'] *= 2", "number", "{t} = ({a} * m.stats['factor']).sin()"
    ),
    Between(
        "shelf['function'] = torch.cos", "number", "{t} = shelf['function']({a}) * {a}"
    ),
    Between("shelf['factor'] += 1", "number", "{t} = ({a} * shelf['factor']).sin()"),
    Between(
        "outputs = (*outputs, m.scale)\nm.scale = nn.Parameter(m.scale.detach() * 2)",
        reading=_SCALE,
    ),
    Between("m.linear.weight, m.weight = m.weight, m.linear.weight", reading=_LINEAR),
    Between(
        "outputs = (*outputs, m.scale)\nm.scale = nn.Parameter(torch.ones(1))",
        "bound",
        _SCALE,
    ),
    Between(
        "outputs = (*outputs, *m.linear.parameters())\nm.linear = nn.Linear(4, 4)",
        "bound",
        _LINEAR,
    ),
    Between("n.norm = nn.BatchNorm1d(4)", "bound", "{t} = n.norm({a}).sin()"),
    Between("m.stats['mean'] = m.stats['mean'] + 1", "bound", _MEAN),
    Between("m.stats = dict(m.stats, mean=torch.ones(4))", reading=_MEAN),
    Between("m.entries[0] = m.entries[0] * 2", "bound", _ENTRIES),
    Between("m.entries[0] = m.entries[1]", "bound", _ENTRIES),
    Between("m.entries[1] = m.entries[0]", "bound", _ENTRIES),
    Between("m.entries.reverse()", "bound", _ENTRIES),
    Between("m.entries.insert(0, torch.ones(4))", "bound", _ENTRIES),
    Between("m.entries.append(torch.ones(4))", reading=_ENTRIES),
    Between("del m.entries[1:]", "bound", "{t} = ({a} * m.entries[-1]).sin()"),
    Between("shelf['shift'] = shelf['shift'] * 2", "bound", _SHIFT),
    Between("shelf['shift'] = shelf['rows'][1]", "bound", _SHIFT),
    Between("y = y.detach() * 2", "bound", _CLOSURE),
    Between("y = y.t()", "bound", _CLOSURE),
    Between("y = outputs[-1]", "bound", _CLOSURE),
)

BACKWARDS = (
    "loss.backward()",
    "loss.backward(retain_graph=True)\nloss.backward()",
    "grads = torch.autograd.grad(\n"
    "    loss, leaves(m, n, x, y), create_graph=True, allow_unused=True\n)\n"
    "score(*grads).backward()",
    "(grad,) = torch.autograd.grad(loss, x, retain_graph=True)\n"
    "outputs = (*outputs, grad)\nloss.backward()",
    "with execution_group():\n"
    "    loss.backward(retain_graph=True)\n    loss.backward()",
    "for output in outputs:\n    if output.requires_grad:\n"
    "        score(output).backward(retain_graph=True)",
)
