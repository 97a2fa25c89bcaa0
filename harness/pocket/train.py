"""``python -m harness.pocket.train``: train the pocket model on the pocket world, on CUDA GPUs.

Seeded, resumable: it trains for `--minutes`, writes a checkpoint, and goes on from there when it is
started again with the same folder. With several GPUs, start it with ``torchrun --nproc-per-node``.

What made training work (found by trying, see the model card): a loss on the vision encoder's own
patches, which glyph or icon has its centre there, without which nothing is learned from pixels for
millions of items; weights drawn by fan-in; experts that start as families (arXiv 2212.05055), which
leaves them similar enough for re-routing to have a meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pickle
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from harness.pocket import sheets as sheets_of
from harness.pocket.initial import families_of, init
from harness.pocket.losses import balance_loss, steepness_loss
from harness.pocket.network import Network, Vision, compile_blocks, positions_of
from harness.pocket.optimizer import Muon, is_hidden_matrix
from harness.pocket.recipe import Recipe
from harness.pocket.special import token_id
from harness.pocket.world.batch import TASKS, Minibatch, draw
from harness.pocket.world.draw import HELD_OUT, MERGED, TRAIN, Draws
from harness.pocket.world.text import Codec
from harness.pocket.world.things import things_of

IMAGE_PAD = token_id("<|image_pad|>")
CHECKPOINT = "checkpoint.pt"
WEIGHTS = "model.safetensors"
AUX = "aux.safetensors"
LOG = "log.jsonl"
DRAWN_AT_ONCE = 8
"""Minibatches that share a picture size and are drawn together."""


@dataclass(frozen=True)
class Options:
    """How to train.

    Attributes:
        steps: of the whole schedule, over all pieces.
        lr: highest learning rate.
        optimizer: ``muon`` or ``adamw``.
        items: of each task, in a step of one GPU.
        rag_from: share of the schedule after which notes with pictures join in.
        decay: share of the schedule, at its end, over which the learning rate falls to 0.
        aux: weight of the loss on patches at the start; it falls to a tenth.
        balance: weight of the load-balancing loss.
        steepness: weight of the loss on unequal weights of a token's experts.
        families: groups in which experts start alike; 0 for none.
        noise: how much of an expert is its own at the start, 0 to 1.
        pull: how far an expert moves towards its family's mean in a step at the full learning rate.
            The share of its weights' norm that stays its own settles near sqrt(4e-5 / 2 pull) at a
            learning rate of 3e-3.
        scatter: factor on what is an expert's own, beyond its family's mean, in weights that training
            starts from; 1 leaves them. Experts that have grown too alike for routing to matter come
            apart again, at once and not by thousands of steps.
        average: decay of the moving average of weights that is exported.
        seed: of everything.
    """

    steps: int = 20_000
    lr: float = 1.5e-3
    optimizer: str = "muon"
    ocr: int = 384
    cc: int = 128
    rag: int = 96
    rag_from: float = 0.1
    decay: float = 0.35
    aux: float = 0.2
    balance: float = 0.01
    steepness: float = 0.1
    families: int = 8
    noise: float = 0.3
    pull: float = 0.0
    scatter: float = 1.0
    average: float = 0.998
    seed: int = 0


class Trainer:
    """The state of a training run on one GPU of `world`."""

    def __init__(self, options: Options, device: torch.device, rank: int, world: int) -> None:
        self.o, self.device, self.rank, self.world = options, device, rank, world
        recipe = Recipe()
        self.top_k = recipe.experts_per_token
        self.codec = Codec(sheets_of.load().to(device))
        things = things_of(self.codec.sheets).total
        self.network = Network(recipe).to(device)
        init(self.network, options.seed, families=options.families or None, noise=options.noise)
        torch.manual_seed(options.seed)
        self.aux = nn.Linear(recipe.vision_hidden_size, things).to(device)
        # From nothing, so that beside trained weights it does not begin by pulling at them; and a
        # thing is rarely on a patch.
        nn.init.zeros_(self.aux.weight)
        nn.init.constant_(self.aux.bias, -5.0)
        self.average = {k: v.detach().clone() for k, v in self.network.state_dict().items()}
        # Made once: a number copied to the device has the host wait for it.
        self.rarity = torch.full((), 8.0, device=device)
        state = self.network.state_dict()  # shares memory with the parameters
        self.live = [state[k] for k in self.average]
        self.families = [
            (p, families_of(options.seed, k, recipe.experts, options.families).to(device))
            for k, p in self.network.named_parameters()
            if ".experts." in k and options.families
        ]
        self.optimizers = self._optimizers()
        self.step = 0
        self._seed(0)

    def _seed(self, piece: int) -> None:
        # Pieces and ranks each have their own stream: nothing is drawn twice.
        seed = self.o.seed * 1_000_003 + piece * 1_009 + self.rank
        generator = torch.Generator(self.device).manual_seed(seed)
        self.draws = Draws(generator)
        # Shapes are the same on all ranks, so that none waits for another's larger batch.
        self.rng = random.Random(self.o.seed * 1_000_003 + piece)
        self.waiting: dict[str, list[Minibatch]] = {task: [] for task in TASKS}

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        named = [*self.network.named_parameters()]
        named += [(f"aux.{k}", p) for k, p in self.aux.named_parameters()]
        muon = self.o.optimizer == "muon"
        hidden = [p for k, p in named if muon and is_hidden_matrix(k, p)]
        chosen = {id(p) for p in hidden}
        decayed = [p for k, p in named if id(p) not in chosen and p.ndim >= 2]
        plain = [p for k, p in named if id(p) not in chosen and p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": 0.01},
            {"params": plain, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        adam = torch.optim.AdamW(groups, lr=self.o.lr, betas=(0.9, 0.98), fused=fused)
        return [adam, *([Muon(hidden, lr=self.o.lr)] if hidden else [])]

    def rate(self) -> float:
        """Share of the highest learning rate: warm-up, a plateau, then down to 0."""
        left = (self.o.steps - self.step) / max(self.o.decay * self.o.steps, 1)
        return min(1.0, (self.step + 1) / 200, max(left, 0.0))

    def losses(
        self, batch: Minibatch, aux_weight: float, hidden: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to minimise, and its parts; `hidden` as for `hide`."""
        height, width = batch.pixels.shape[2:]
        pixels = batch.pixels.float() / 127.5 - 1
        grid = (height // MERGED, width // MERGED)
        positions = positions_of(batch.tokens, IMAGE_PAD, grid)
        with torch.autocast(self.device.type, torch.bfloat16):
            vision = self.network.encode(pixels)
            if hidden is not None:
                batch, positions, vision = hide(batch, positions, vision, hidden)
            out = self.network(vision, batch.tokens, positions)
            logits = self.network.lm_head(out.hidden)
            seen = self.aux(vision.patches)
        # All rows, not the answers' alone: picking rows would have the host wait for the device.
        target = batch.tokens.where(batch.answer, -100)[:, 1:]
        said = functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), target.flatten(), ignore_index=-100
        )
        things = batch.things.to(torch.float32)
        patch = functional.binary_cross_entropy_with_logits(
            seen.float(), things, reduction="none", pos_weight=self.rarity
        )
        patch = patch.sum(-1).mean()
        balance = balance_loss(out.router_logits, batch.valid, self.top_k)
        steep = steepness_loss(out.router_logits, batch.valid, self.top_k)
        total = said + aux_weight * patch + self.o.balance * balance + self.o.steepness * steep
        parts = {"said": said, "aux": patch, "balance": balance, "steepness": steep}
        return total, {k: v.detach() for k, v in parts.items()}

    def _next(self, task: str) -> Minibatch:
        # Drawing costs thousands of small launches, whatever the number of items.
        waiting = self.waiting[task]
        if not waiting:
            n = getattr(self.o, task) * DRAWN_AT_ONCE
            batch = draw(self.codec, self.draws, self.rng, task, n, TRAIN)
            order = self.draws.uniform(len(batch.tokens)).argsort()
            waiting += batch.parts(DRAWN_AT_ONCE, order)
        return waiting.pop()

    def train_step(self) -> dict[str, Tensor]:
        """One step over all tasks; gives their losses."""
        progress = self.step / self.o.steps
        aux = self.o.aux * (0.1 + 0.9 * max(0.0, 1 - 1.5 * progress))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.o.lr * self.rate()
            optimizer.zero_grad(set_to_none=True)
        found: dict[str, Tensor] = {}
        for task in TASKS:
            if task == "rag" and progress < self.o.rag_from:
                continue
            batch = self._next(task)
            hidden = some_blank(batch, self.draws) if self.step % 2 else None
            loss, parts = self.losses(batch, aux, hidden)
            loss.backward()
            found |= {f"{task} {k}": v for k, v in parts.items()}
        params = [*self.network.parameters(), *self.aux.parameters()]
        if self.world > 1:
            _share_gradients(params, self.world)
        found["norm"] = nn.utils.clip_grad_norm_(self.network.parameters(), 1.0, foreach=True)
        nn.utils.clip_grad_norm_(self.aux.parameters(), 1.0, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.o.pull:
            self._pull_families()
        keep = min(self.o.average, (self.step + 1) / (self.step + 10))
        torch._foreach_lerp_(list(self.average.values()), self.live, 1 - keep)
        self.step += 1
        return found

    @torch.no_grad()
    def _pull_families(self) -> None:
        """Keep the experts of a family alike.

        In large models some experts resemble others, which re-routing lives by. Left alone, so few
        steps from so few families make experts that have nothing in common.
        """
        for parameter, family in self.families:
            parameter.lerp_(self._family_mean(parameter, family), self.o.pull * self.rate())

    def _family_mean(self, parameter: Tensor, family: Tensor) -> Tensor:
        """Of each expert's family: [experts, …], as `parameter`."""
        total = torch.zeros_like(parameter[: self.o.families]).index_add_(0, family, parameter)
        return (total * (self.o.families / len(parameter)))[family]

    def exact(self, rounds: int, items: int, split: str = HELD_OUT) -> dict[str, float]:
        """Share of answers that the averaged model says without a mistake, by kind.

        Teacher-forced: an answer counts if every token of it is the likeliest, which is when
        greedy decoding gives it.
        """
        # Gradients stay on: without them every block would be compiled once more.
        live = {k: v.clone() for k, v in self.network.state_dict().items()}
        self.network.load_state_dict(self.average)
        draws = Draws(torch.Generator(self.device).manual_seed(1_234))
        rng = random.Random(5)
        right: dict[str, list[float]] = defaultdict(list)
        for task in TASKS:
            for _ in range(rounds):
                batch = draw(self.codec, draws, rng, task, items, split)
                kinds, print_px = batch.kind.tolist(), batch.print_px.tolist()
                for kind, px, good in zip(kinds, print_px, self._right(batch), strict=True):
                    band = " large" if px >= 20 else " fine" if 0 < px < 16 else ""
                    right[f"{task} {batch.kinds[kind]}{band}"].append(good)
        self.network.load_state_dict(live)
        return {k: sum(v) / len(v) for k, v in sorted(right.items())}

    def _right(self, batch: Minibatch) -> list[float]:
        height, width = batch.pixels.shape[2:]
        positions = positions_of(batch.tokens, IMAGE_PAD, (height // MERGED, width // MERGED))
        with torch.autocast(self.device.type, torch.bfloat16):
            vision = self.network.encode(batch.pixels.float() / 127.5 - 1)
            out = self.network(vision, batch.tokens, positions)
            likeliest = self.network.lm_head(out.hidden).argmax(-1)
        return batch.right(likeliest).float().tolist()

    def state(self) -> dict[str, Any]:
        """All that a later piece needs."""
        return {
            "options": asdict(self.o),
            "step": self.step,
            "network": self.network.state_dict(),
            "aux": self.aux.state_dict(),
            "average": self.average,
            "optimizers": [o.state_dict() for o in self.optimizers],
        }

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """Take weights, without the optimizers' state. Tokens that they lack stay as drawn."""
        with torch.no_grad():
            for k, v in self.network.state_dict().items():
                if k not in weights:
                    raise ValueError(f"the weights to start from lack {k}")
                given = weights[k]
                tokens = k.endswith(("embed_tokens.weight", "lm_head.weight"))
                if given.shape[1:] != v.shape[1:] or len(given) > len(v):
                    raise ValueError(f"{k} is {tuple(given.shape)} and not {tuple(v.shape)}")
                if len(given) < len(v) and not tokens:
                    raise ValueError(f"{k} is {tuple(given.shape)} and not {tuple(v.shape)}")
                v[: len(given)].copy_(given)
            for parameter, family in self.families:
                mean = self._family_mean(parameter, family)
                parameter.copy_(mean + self.o.scatter * (parameter - mean))
            for k, v in self.network.state_dict().items():
                self.average[k].copy_(v)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`.

        Raises:
            ValueError: what may not change between pieces has changed.
        """
        for name in ("seed", "families", "optimizer"):
            before, now = state["options"][name], getattr(self.o, name)
            if before != now:
                raise ValueError(
                    f"the checkpoint was trained with --{name} {before}, and this is --{name} {now}; "
                    "give the same, or another folder"
                )
        self.network.load_state_dict(state["network"])
        self.aux.load_state_dict(state["aux"])
        for k, v in state["average"].items():
            self.average[k].copy_(v)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self._seed(self.step)


def some_blank(batch: Minibatch, draws: Draws) -> Tensor:
    """A random share, different for each item, of the vision tokens with nothing on or near them.

    The model is to take missing background in its stride, as large ones do: else answers would get
    worse with pruning for no better reason than that no pruned picture was ever seen.

    Returns:
        bool [B, vision tokens of an item].
    """
    height, width = batch.pixels.shape[2:]
    rows, columns = height // MERGED, width // MERGED
    used = batch.things.any(-1).view(-1, 1, 2 * rows, 2 * columns).float()
    used = functional.max_pool2d(used, 2)
    near = functional.max_pool2d(used, 3, stride=1, padding=1)
    blank = near.view(len(batch.tokens), -1) == 0
    share = draws.uniform(len(blank), 1)
    return blank & (draws.uniform(*blank.shape) < share)


def hide(
    batch: Minibatch, positions: Tensor, vision: Vision, hidden: Tensor
) -> tuple[Minibatch, Tensor, Vision]:
    """Take vision tokens out of the conversations, the others keep their positions.

    They go behind everything else, where attention, which is causal, does not reach them; so the
    shapes stay, whatever the number.

    Args:
        batch: of B items.
        positions: int64 [3, B, L].
        vision: of the batch's pictures.
        hidden: bool [B, vision tokens of an item].
    """
    pads = batch.tokens == IMAGE_PAD
    rank = (pads.cumsum(1) - 1).clamp(min=0)
    out = pads & hidden.gather(1, rank)
    order = out.to(torch.uint8).argsort(stable=True, dim=1)
    of_rows = hidden.to(torch.uint8).argsort(stable=True, dim=1)[..., None]

    def moved(rows: Tensor) -> Tensor:
        items = rows.view(len(hidden), -1, rows.shape[-1])
        return items.gather(1, of_rows.expand(-1, -1, rows.shape[-1])).view(rows.shape)

    seen = dataclasses.replace(
        batch,
        tokens=batch.tokens.gather(1, order),
        answer=batch.answer.gather(1, order),
        valid=(batch.valid & ~out).gather(1, order),
    )
    taps = tuple(moved(t) for t in vision.taps)
    return (
        seen,
        positions.gather(2, order.expand(3, -1, -1)),
        Vision(moved(vision.merged), taps, vision.patches),
    )


def _share_gradients(params: list[nn.Parameter], world: int) -> None:
    grads = [p.grad for p in params if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= world
    parts = flat.split([g.numel() for g in grads])
    torch._foreach_copy_(grads, [part.view_as(g) for g, part in zip(grads, parts, strict=True)])


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Tensors as bfloat16, under the names that they have."""
    from safetensors.torch import save_file

    halves = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in tensors.items()}
    draft = path.with_name(f".{path.name}.new")
    save_file(halves, draft, metadata={"format": "pt"})
    draft.chmod(0o644)  # safetensors writes for the owner only
    draft.replace(path)


def save(trainer: Trainer, folder: Path) -> None:
    """Write the checkpoint and the weights; each appears whole or not at all."""
    draft = folder / f".{CHECKPOINT}.new"
    torch.save(trainer.state(), draft)
    draft.replace(folder / CHECKPOINT)
    write_tensors(folder / WEIGHTS, trainer.average)
    write_tensors(folder / AUX, trainer.aux.state_dict())


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """The command line, checked; ends the program with a reason where it asks for what cannot be."""
    parser = argparse.ArgumentParser(prog="python -m harness.pocket.train", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the checkpoint, the weights and the log")
    parser.add_argument("--minutes", type=float, default=20.0, help="of this piece (default 20)")
    parser.add_argument(
        "--start-from", type=Path, help=f"weights to start from; takes {AUX} beside"
    )
    parser.add_argument(
        "--exact-every", type=int, default=1_000, help="steps between held-out looks"
    )
    parser.add_argument(
        "--exact-items", type=int, default=128, help="of each task, four times; 0: no last look"
    )
    parser.add_argument("--no-compile", action="store_true", help="for short trials")
    for name, value in asdict(Options()).items():
        flag = "--" + name.replace("_", "-")
        choices = ("muon", "adamw") if name == "optimizer" else None
        parser.add_argument(
            flag, type=type(value), default=value, choices=choices, help=f"default {value}"
        )
    args = parser.parse_args(argv)
    if not args.minutes >= 0:
        parser.error(f"--minutes {args.minutes}: takes a number from 0 on; 0 makes one step")
    for name in ("steps", "ocr", "cc", "rag", "exact_every"):
        if not getattr(args, name) > 0:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} {getattr(args, name)}: takes a number above 0")
    for name in ("exact_items", "families", "seed"):
        if not 0 <= getattr(args, name) < 2**31:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} {getattr(args, name)}: takes a whole number from 0 on")
    if not 0 < args.lr < math.inf:
        parser.error(f"--lr {args.lr}: takes a number above 0")
    if not 0 <= args.average < 1:
        parser.error(f"--average {args.average}: takes a number in [0, 1)")
    if Recipe().experts % max(args.families, 1):
        parser.error(f"--families {args.families}: takes a divisor of {Recipe().experts}, or 0")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"{args.folder}: no folder can be made there ({error.strerror})")
    if args.start_from is not None:
        if not args.start_from.is_file():
            parser.error(f"--start-from {args.start_from}: no such file")
        if (args.folder / CHECKPOINT).is_file():
            parser.error(
                f"{args.folder} holds a checkpoint, from which it goes on; leave --start-from out, or "
                "name another folder"
            )
    return parser, args


def _load(trainer: Trainer, folder: Path, start_from: Path | None) -> None:
    """Go on from the folder's checkpoint, or start from weights, or from nothing.

    Raises:
        ValueError: what is there does not fit; the message names it.
    """
    checkpoint = folder / CHECKPOINT
    if checkpoint.is_file():
        try:
            state = torch.load(checkpoint, map_location=trainer.device, weights_only=True)
            trainer.restore(state)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{checkpoint}: {error}") from error
        except (EOFError, LookupError, TypeError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{checkpoint}: is no checkpoint, or damaged ({error!r}); name another folder"
            ) from error
    elif start_from is not None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            trainer.start_from(load_file(start_from))
        except (ValueError, OSError, SafetensorError) as error:
            raise ValueError(f"--start-from {start_from}: {error}") from error
        beside = start_from.with_name(AUX)
        if beside.is_file():
            try:
                trainer.aux.load_state_dict(load_file(beside))
            except (RuntimeError, OSError, SafetensorError) as error:
                raise ValueError(f"{beside}: does not fit; take it away ({error})") from error


def _train(
    trainer: Trainer, args: argparse.Namespace, say: Callable[..., None], over: Callable[[], bool]
) -> bool:
    """Steps until the schedule's end or until it is `over`; gives whether the loss stayed a number."""
    world, mark, mark_step = trainer.world, time.monotonic(), trainer.step
    while trainer.step < trainer.o.steps:
        found = trainer.train_step()
        if trainer.step % 100 == 0:
            values = {k: round(float(v), 4) for k, v in found.items()}
            now = time.monotonic()
            pace = (trainer.step - mark_step) / (now - mark)
            mark, mark_step = now, trainer.step
            say(pace=round(pace, 2), rate=round(trainer.rate(), 3), **values)
            if not math.isfinite(sum(values.values())):
                return False
        if args.exact_items and trainer.step % args.exact_every == 0:
            if trainer.rank == 0:
                say(exact={k: round(v, 3) for k, v in trainer.exact(4, args.exact_items).items()})
            mark, mark_step = time.monotonic(), trainer.step
        if world == 1 or trainer.step % 10 == 0:
            ends = torch.tensor(float(over()), device=trainer.device)
            if world > 1:
                dist.all_reduce(ends, dist.ReduceOp.MAX)
            if float(ends) > 0:
                break
    return all(bool(t.isfinite().all()) for t in trainer.average.values())


def main() -> int:
    """Train; gives the exit status."""
    parser, args = parse()
    options = Options(**{k: getattr(args, k) for k in asdict(Options())})
    begun = time.monotonic()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    )
    if cuda:
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    trainer = Trainer(options, device, rank, world)
    try:
        _load(trainer, args.folder, args.start_from)
    except ValueError as error:
        parser.error(str(error))
    if not args.no_compile:
        compile_blocks(trainer.network)
    stop = {"asked": False}
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stop.update(asked=True))

    def say(**line: object) -> None:
        if rank == 0:
            text = json.dumps(
                {"step": trainer.step, "s": round(time.monotonic() - begun, 1), **line}
            )
            print(text, flush=True)
            with (args.folder / LOG).open("a") as file:
                file.write(text + "\n")

    def over() -> bool:
        return stop["asked"] or time.monotonic() - begun > 60 * args.minutes

    if trainer.step >= options.steps:
        say(done=f"all {options.steps} steps were made before; give more with --steps")
        return 0
    say(resumed=trainer.step > 0, options=asdict(options), gpus=world, device=str(device))
    if not _train(trainer, args, say, over):
        print(
            "error: the loss is no number; nothing was saved, start again with a lower --lr",
            file=sys.stderr,
        )
        return 1
    if rank == 0:
        save(trainer, args.folder)
        say(saved=str(args.folder))
        if args.exact_items:
            say(exact={k: round(v, 3) for k, v in trainer.exact(8, args.exact_items).items()})
    if world > 1:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
