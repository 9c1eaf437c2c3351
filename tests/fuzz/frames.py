"""What stands around the statements of a program: blocks, and how a step goes on."""

from __future__ import annotations

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

# What happens between forward and backward, and why a region may refuse it.
BETWEEN = (
    ("m.scale.data = m.scale.data * 0.5", "replaced"),
    ("m.linear.weight.data = m.linear.weight.data.clone()", "replaced"),
    ("m.scale.data.mul_(0.5)", "unseen between"),
    ("m.codebook.data.mul_(0.5)", "unseen between"),
    ("m.mean.add_(1)", "written since"),
    ("n.norm.running_mean.zero_()", "written since"),
    ("n.norm(x.detach())", "written since"),
    ("n.eval()", ""),
    ("m.seen += 1", ""),
    ("m.rebound = m.rebound * 2", ""),
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
