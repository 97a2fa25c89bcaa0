"""The pocket CLIP: a small contrastive model of the pocket world's scenes, in `open_clip`'s own form.

Its folder is what ``open_clip`` reads as ``local-dir:FOLDER``: ``open_clip_config.json``, weights in
fp16 and a tokenizer, at most 4 MB. `load` reads it through `open_clip` itself, as any other model.

Text is tokenized as for the pocket model, a character a token, without the phrases of its prompts,
and with ``<|im_end|>`` at the end, from which the text tower reads its result. `open_clip` first
cleans every text: white space is collapsed, and full-width letters and marks become ASCII (``，``
is ``,``), so that captions which differ in these only are the same.

Needs `open_clip` (the extra ``clip``); only this module does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image as PillowImage
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.pocket.optimizer import Muon, is_hidden_matrix
from harness.pocket.special import SPECIAL_TOKENS, token_id
from harness.pocket.tokenizer import tokenizer_json

FOLDER = Path(__file__).parent / "clip"
WEIGHTS_FILE = "open_clip_model.safetensors"
END, PAD = "<|im_end|>", "<|endoftext|>"

GAINS = {"embedding": 0.3, "positions": 0.1, "branch_out": 0.3}
"""Standard deviations of token and position embeddings at the start; the last matrix of every branch,
in multiples of what its inputs call for."""

WHOLE = 0.5
"""Weight of the loss on wholes, in multiples of that on patches."""

DrawBatch = Callable[[int], Sequence[Tensor]]
"""Step number → the pictures, uint8 [N, H, W, 3], and caption tokens, int64 [N, context], of that
step's batch, on the training device. The same step must give the same batch. Captions end with
`END` and are padded with `PAD`, as `tokenize` does; pictures may have any size. For `train_clip`
with `things`, also which of them have their centre in which patch, bool [N, patches, things], in
raster order, and which of them the captions name, bool [N, things]."""


@dataclass(frozen=True)
class ClipRecipe:
    """Sizes of the pocket CLIP. With the pocket vocabulary, weights of the default take 3.7 MB.

    Attributes:
        context: longest caption [tokens], its end included.
        image_size: side to which every picture is squashed [px]; a multiple of `patch`.
    """

    embed: int = 128
    context: int = 128
    image_size: int = 160
    patch: int = 16
    vision_width: int = 128
    vision_layers: int = 5
    text_width: int = 128
    text_layers: int = 3
    heads: int = 4


@dataclass(frozen=True)
class Clip:
    """A model as `open_clip` loads it.

    Attributes:
        model: ``encode_image`` and ``encode_text``, both with ``normalize=True``; in eval mode.
        preprocess: a picture of Pillow's → float32 [3, size, size].
        tokenizer: texts → int64 [N, context].
        device: where the model is.
    """

    model: Any
    preprocess: Callable[[PillowImage.Image], Tensor]
    tokenizer: Callable[[list[str]], Tensor]
    device: torch.device


@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        step, steps: done, and all.
        loss: CLIP's own, the mean over the last (up to 50) steps of this call; nan if it did none.
        patch: the loss on patches, likewise; nan without `things`.
        whole: the loss on what pictures and captions tell of, likewise.
        pairs_per_s: throughput of this call.
    """

    step: int
    steps: int
    loss: float
    patch: float
    whole: float
    pairs_per_s: float

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps


# -- the folder -----------------------------------------------------------------------------------


def model_config(recipe: ClipRecipe, vocabulary: int) -> dict[str, Any]:
    """``open_clip_config.json``."""
    return {
        "model_cfg": {
            "embed_dim": recipe.embed,
            "vision_cfg": {
                "image_size": recipe.image_size,
                "patch_size": recipe.patch,
                "width": recipe.vision_width,
                "head_width": recipe.vision_width // recipe.heads,
                "layers": recipe.vision_layers,
            },
            "text_cfg": {
                "context_length": recipe.context,
                "vocab_size": vocabulary,
                "width": recipe.text_width,
                "heads": recipe.heads,
                "layers": recipe.text_layers,
                "pool_type": "eos",
                "eos_id": token_id(END),
                "pad_id": token_id(PAD),
                # Any name: beside a model in a local folder, open_clip takes that folder's tokenizer.
                "hf_tokenizer_name": "pocket",
            },
        },
        "preprocess_cfg": {
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "interpolation": "bilinear",
            "resize_mode": "squash",
        },
    }


def clip_tokenizer_json() -> dict[str, Any]:
    """``tokenizer.json``: the pocket model's without its phrases, and with `END` after each text."""
    tree = tokenizer_json()
    phrases = {t["content"] for t in tree["added_tokens"] if t["content"] not in SPECIAL_TOKENS}
    vocabulary = {t: i for t, i in tree["model"]["vocab"].items() if t not in phrases}
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise ValueError("phrases must have the last ids of the vocabulary")
    tree["added_tokens"] = [t for t in tree["added_tokens"] if t["content"] not in phrases]
    tree["model"]["vocab"] = vocabulary
    end = {"SpecialToken": {"id": END, "type_id": 0}}
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, end],
        "pair": [
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}},
            end,
        ],
        "special_tokens": {END: {"id": END, "ids": [token_id(END)], "tokens": [END]}},
    }
    return tree


def write_folder(folder: Path, recipe: ClipRecipe) -> None:
    """Write configuration and tokenizer; weights, if any, stay as they are."""
    tokenizer = clip_tokenizer_json()
    files = {
        "open_clip_config.json": model_config(recipe, len(tokenizer["model"]["vocab"])),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": recipe.context,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in files.items():
        text = json.dumps(tree, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


def load(device: str | torch.device = "cpu", folder: Path = FOLDER) -> Clip:
    """The trained model with its preprocessing and tokenizer, in fp32, through `open_clip`.

    Raises:
        ImportError: `open_clip` is not installed.
        RuntimeError, ValueError, FileNotFoundError: `folder` holds no complete model.
    """
    import open_clip

    name = f"local-dir:{folder}"
    model, preprocess = open_clip.create_model_from_pretrained(name, device=device)
    tokenizer = open_clip.get_tokenizer(name)
    return Clip(model.eval(), preprocess, tokenizer, torch.device(device))


def tokenize(captions: Sequence[str], folder: Path = FOLDER) -> Tensor:
    """Captions as the folder's tokenizer gives them: int64 [N, context], on the CPU.

    Longer ones are cut and still end with `END`.
    """
    import open_clip

    return open_clip.get_tokenizer(f"local-dir:{folder}")(list(captions))


# -- training -------------------------------------------------------------------------------------


def train_clip(
    draw_batch: DrawBatch,
    *,
    steps: int,
    seconds: float = float("inf"),
    device: str | torch.device = "cuda",
    folder: Path = FOLDER,
    checkpoint: Path | None = None,
    recipe: ClipRecipe | None = None,
    things: int = 0,
    seed: int = 0,
    lr: float = 3e-3,
    warmup: int = 200,
    decay: float = 0.4,
    aux: float = 0.2,
    log: Callable[[Progress], None] = print,
) -> Progress:
    """Train the pocket CLIP, or go on training it, and write its folder.

    The loss is the symmetric cross entropy of CLIP with a learnt temperature; pairs with equal
    captions in a batch do not count as wrong for each other. With `things`, two linear heads that
    are dropped afterwards add what this loss alone is slow to find: which things are on which
    patch, and which ones a whole picture shows and a caption names, told from both embeddings by
    the same weights. Muon for matrices, AdamW for the rest; bf16 autocast on CUDA, weights in fp32.

    Args:
        draw_batch: see `DrawBatch`. Captions must be cut to `recipe.context`.
        steps: length of the whole training; sets the schedule.
        seconds: stop after the step in which they run out [s]; the folder then holds what there is.
        device: where to train.
        folder: where the model goes.
        checkpoint: a file from which an earlier call is resumed, if it is there, and which is written
            at the end and every 60 s.
        recipe: sizes; those of the checkpoint must be the same.
        things: how many things the batches tell of; 0 trains on CLIP's loss alone.
        seed: of the initial weights.
        lr: highest learning rate.
        warmup: steps until it is reached; at most a tenth of `steps`.
        decay: share of `steps`, at their end, over which it falls to 0.
        aux: weight of the loss on patches at the start; both heads' losses fall to a tenth.
        log: told the progress every 100 steps.

    Raises:
        ImportError: `open_clip` is not installed.
        ValueError: the checkpoint is of another recipe or another length.
    """
    recipe = recipe or ClipRecipe()
    device = torch.device(device)
    write_folder(folder, recipe)
    trainer = _Trainer(folder, recipe, things, seed, device)
    plan = {"recipe": asdict(recipe), "steps": steps, "seed": seed, "things": things}
    step = trainer.resume(checkpoint, plan) if checkpoint else 0

    begin = saved = time.monotonic()
    losses: list[Tensor] = []
    pairs, first = 0, step

    def progress() -> Progress:
        # Reading a loss waits for the device.
        none = float("nan")
        means = torch.stack(losses).mean(0).tolist() if losses else []
        loss, patch, whole = [*means, none, none, none][:3]
        elapsed_s = time.monotonic() - begin
        pace = pairs / elapsed_s if elapsed_s > 0 else 0.0
        return Progress(step, steps, loss, patch, whole, pace)

    while step < steps and (step == first or time.monotonic() - begin < seconds):
        batch = draw_batch(step)
        rate = lr * _schedule(step, steps, warmup, decay)
        weight = aux * (0.1 + 0.9 * max(0.0, 1 - 1.5 * step / steps))
        losses = [*losses[-49:], trainer.train_step(batch, rate, weight)]
        pairs += len(batch[1])
        step += 1
        if step % 100 == 0:
            log(progress())
        if checkpoint and time.monotonic() - saved > 60:
            trainer.save(checkpoint, plan, step)
            saved = time.monotonic()
    done = progress()
    if checkpoint:
        trainer.save(checkpoint, plan, step)
    export(trainer.model, folder)
    return done


class _Trainer:
    """A model in training, its heads and its optimizers."""

    def __init__(
        self, folder: Path, recipe: ClipRecipe, things: int, seed: int, device: torch.device
    ) -> None:
        import open_clip

        self.device, self.recipe = device, recipe
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
            _draw_weights(self.model)
            self.heads = nn.ModuleDict()
            if things:
                # Of this object only: neither configuration nor weights know of it.
                self.model.visual.output_tokens = True
                # A thing is rarely on a patch, and more often somewhere.
                self.heads["patch"] = _head(recipe.vision_width, things, -5.0)
                self.heads["whole"] = _head(recipe.embed, things, -3.0)
        self.model.to(device).train()
        self.heads.to(device)
        named = [*self.model.named_parameters()]
        hidden = [p for name, p in named if is_hidden_matrix(name, p)]
        taken = {id(p) for p in hidden}
        rest = [p for _, p in named if id(p) not in taken] + [*self.heads.parameters()]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.01},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=device.type == "cuda")
        self.optimizers = [adam, Muon(hidden)]

    def losses(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """CLIP's own and, with heads, those on patches and on wholes; scalars in fp32."""
        pictures, tokens, *labels = batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            seen = self.model.visual(_pixels(pictures, self.recipe.image_size))
            texts = self.model.encode_text(tokens)
            if not self.heads:
                return [contrastive_loss(seen, texts, self.model.logit_scale, tokens)]
            images, patches = seen
            on_patches = self.heads["patch"](patches)
        things, named = labels
        both = F.normalize(torch.cat([images, texts]).float(), dim=-1)
        # Elements of about 1, as a head's other inputs have them.
        told = self.heads["whole"](both * self.recipe.embed**0.5)
        return [
            contrastive_loss(images, texts, self.model.logit_scale, tokens),
            thing_loss(on_patches, things, 8.0),
            thing_loss(told, torch.cat([things.any(1), named]), 1.0),
        ]

    def train_step(self, batch: Sequence[Tensor], rate: float, aux: float) -> Tensor:
        """One step; gives what `losses` gives, detached, float32 [1 or 3]."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        found = self.losses(batch)
        total = found[0]
        if self.heads:
            total = total + aux * (found[1] + WHOLE * found[2])
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.heads:
            nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        with torch.no_grad():
            self.model.logit_scale.clamp_(0, 4.6052)  # ln 100, as published
        return torch.stack(found).detach()

    def save(self, file: Path, plan: dict[str, Any], step: int) -> None:
        """Write all that a later call needs."""
        state = {
            "plan": plan,
            "step": step,
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
        }
        partial = file.with_name(file.name + ".partial")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        partial.replace(file)

    def resume(self, file: Path, plan: dict[str, Any]) -> int:
        """Go on from a file, if it is there; gives the steps done.

        Raises:
            ValueError: it is of another plan.
        """
        if not file.is_file():
            return 0
        state = torch.load(file, map_location=self.device, weights_only=True)
        if state["plan"] != plan:
            raise ValueError(
                f"{file}: made with {state['plan']}, not with {plan}; remove it to begin anew"
            )
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"])


def thing_loss(logits: Tensor, things: Tensor, positive: float) -> Tensor:
    """Binary cross entropy, summed over things, the mean over all else: a scalar in fp32.

    Args:
        logits: [..., things].
        things: bool [..., things].
        positive: weight of what is there.
    """
    weight = torch.full((), positive, device=logits.device)
    loss = F.binary_cross_entropy_with_logits(
        logits.float(), things.float(), reduction="none", pos_weight=weight
    )
    return loss.sum(-1).mean()


def contrastive_loss(images: Tensor, texts: Tensor, logit_scale: Tensor, tokens: Tensor) -> Tensor:
    """CLIP's loss, a scalar in fp32.

    Args:
        images, texts: [N, embed], not normalised; row i of one belongs to row i of the other.
        logit_scale: logarithm of the inverse temperature, scalar.
        tokens: int64 [N, context], the captions; other pairs with equal ones are left out.
    """
    images, texts = F.normalize(images.float(), dim=-1), F.normalize(texts.float(), dim=-1)
    logits = logit_scale.exp() * images @ texts.T
    # Pair by pair, since finding the different captions would have the host wait for the device.
    itself = torch.eye(len(tokens), dtype=torch.bool, device=tokens.device)
    twins = (tokens[:, None] == tokens[None, :]).all(-1) & ~itself
    logits = logits.masked_fill(twins, float("-inf"))
    target = torch.arange(len(tokens), device=tokens.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def export(model: nn.Module, folder: Path) -> None:
    """Write the weights of an `open_clip` model into its folder, in fp16."""
    weights = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    partial = folder / f"{WEIGHTS_FILE}.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS_FILE)


def _pixels(pictures: Tensor, size: int) -> Tensor:
    """uint8 [N, H, W, 3] → float32 [N, 3, size, size] in [−1, 1], as the preprocessing does it."""
    x = pictures.permute(0, 3, 1, 2).float()
    if x.shape[2:] != (size, size):
        x = F.interpolate(x, (size, size), mode="bilinear", antialias=True, align_corners=False)
    return x / 127.5 - 1


def _schedule(step: int, steps: int, warmup: int, decay: float) -> float:
    """Share of the highest learning rate: warm-up, a plateau, then down to 0."""
    left = (steps - step) / max(decay * steps, 1)
    return min(1.0, (step + 1) / max(1, min(warmup, steps // 10)), left)


def _head(features: int, things: int, bias: float) -> nn.Linear:
    head = nn.Linear(features, things)
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, bias)
    return head


@torch.no_grad()
def _draw_weights(model: nn.Module) -> None:
    """Draw all matrices by fan-in: `open_clip`'s own values are for widths of many hundreds."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            if name.endswith("bias"):
                parameter.zero_()
            continue
        if name.endswith("token_embedding.weight"):
            std = GAINS["embedding"]
        elif name.endswith("positional_embedding"):
            std = GAINS["positions"]
        else:
            # Projections to the embedding are [in, out]; the others are [out, in, ...].
            projection = name.endswith(("visual.proj", "text_projection"))
            fan_in = len(parameter) if projection else parameter[0].numel()
            branch = name.endswith(("out_proj.weight", "c_proj.weight"))
            std = (GAINS["branch_out"] if branch else 1.0) * fan_in**-0.5
        parameter.normal_(0, std)


# -- use ------------------------------------------------------------------------------------------


@torch.inference_mode()
def similarities(
    clip: Clip, images: Sequence[PillowImage.Image], captions: Sequence[str], batch: int = 64
) -> Tensor:
    """Cosine of every picture with every caption: float32 [images, captions], on the CPU."""
    seen = [
        clip.model.encode_image(
            torch.stack([clip.preprocess(i) for i in images[at : at + batch]]).to(clip.device),
            normalize=True,
        )
        for at in range(0, len(images), batch)
    ]
    read = [
        clip.model.encode_text(
            clip.tokenizer(list(captions[at : at + batch])).to(clip.device), normalize=True
        )
        for at in range(0, len(captions), batch)
    ]
    return (torch.cat(seen) @ torch.cat(read).T).float().cpu()


def retrieval(clip: Clip, images: Sequence[PillowImage.Image], captions: Sequence[str]) -> float:
    """Recall@1 among the given pairs: the lower one of picture → caption and caption → picture.

    The share of items whose best match is its own partner, or one with an equal caption. 0..1.

    Args:
        clip: as `load` gives it.
        images: the pictures.
        captions: the caption of each.

    Raises:
        ValueError: no pairs, or unequal numbers.
    """
    if not images or len(images) != len(captions):
        raise ValueError(f"{len(images)} images and {len(captions)} captions: takes pairs")
    table = similarities(clip, images, captions)
    recalls = [
        sum(captions[int(best)] == own for own, best in zip(captions, side.argmax(1), strict=True))
        for side in (table, table.T)
    ]
    return min(recalls) / len(captions)
