"""Train a character model from nothing: nanoGPT's CPU recipe, no framework.

python examples/train_char_gpt.py [text.txt] [--steps 2000] [--resume]

Without a text it learns the Python language reference that ships with CPython. Ctrl-C saves and stops;
--resume goes on from there, to the same bits as a run that was never stopped: batches and learning rates are
functions of the step, and the checkpoint holds everything else.
"""

import argparse
import hashlib
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
from _device import arrays, to_numpy

from npattn import io, nn, optim
from npattn.functional import cross_entropy, cross_entropy_vjp, softmax


def options():
    """The command line. The defaults are the recipe."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", nargs="?", help="a text file; default: the Python language reference")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--min-lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--position", choices=["learned", "rotary", "alibi", "sinusoidal"], default="learned")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=500, help="steps between validations and samples")
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--checkpoint", type=Path, default=Path("char_gpt.safetensors"))
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument(
        "--gradient-checkpointing", action="store_true", help="less memory, a third more work"
    )
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    return parser.parse_args()


def read_text(path):
    """The file's text, or the language reference."""
    if path is not None:
        return Path(path).read_text("utf-8")
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


class Run:
    """One training run: text, model, optimiser, and the step it has come to."""

    def __init__(self, args, text):
        self.args, self.xp, self.step = args, arrays(args.device), 0
        self.characters = "".join(sorted(set(text)))
        number = {character: i for i, character in enumerate(self.characters)}
        ids = np.array([number[character] for character in text])
        split = len(ids) - len(ids) // 10
        self.train, self.val = ids[:split], ids[split:]
        if len(self.val) <= args.context:
            sys.exit(
                f"the text has {len(ids)} characters; context {args.context} needs {10 * args.context + 10}"
            )
        self.facts = {
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            **{name: getattr(args, name) for name in ("layers", "heads", "dim", "context", "batch", "seed")},
            **{
                name: getattr(args, name)
                for name in ("position", "steps", "lr", "min_lr", "warmup", "dropout")
            },
        }
        self.model = nn.TransformerDecoder(
            len(self.characters),
            args.dim,
            args.heads,
            args.layers,
            4 * args.dim,
            args.context,
            position=args.position,
            bias=False,
            dropout_p=args.dropout,
            rng=np.random.default_rng(args.seed),
        )
        if args.device == "gpu":
            self.model.move_to(self.xp)
        self.optimiser = optim.AdamW(self.model.named_parameters(), betas=(0.9, 0.99), weight_decay=0.1)

    def batch(self, step):
        """(batch, context + 1) ids, a function of seed and step."""
        args = self.args
        starts = np.random.default_rng([args.seed, step]).integers(
            0, len(self.train) - args.context, args.batch
        )
        return self.xp.asarray(self.train[starts[:, None] + np.arange(args.context + 1)])

    def advance(self):
        """One step; the loss before it."""
        args = self.args
        batch = self.batch(self.step)
        seed = args.seed * 2**32 + self.step if args.dropout else None
        logits, back_model = self.model.vjp(batch[:, :-1], seed=seed, checkpoint=args.gradient_checkpointing)
        loss, back_loss = cross_entropy_vjp(logits, batch[:, 1:])
        _, grads = back_model(back_loss())
        grads, _ = optim.clip_by_global_norm(grads, 1.0)
        lr = optim.warmup_cosine(
            self.step, lr=args.lr, min_lr=args.min_lr, warmup=min(args.warmup, args.steps), total=args.steps
        )
        self.optimiser.step(grads, lr=lr)
        self.step += 1
        return float(loss)

    def validate(self):
        """Loss over the whole held-out tenth, in windows that do not overlap."""
        context = self.args.context
        count = (len(self.val) - 1) // context
        x = self.val[: count * context].reshape(count, context)
        y = self.val[1 : count * context + 1].reshape(count, context)
        total = 0.0
        for i in range(0, count, 64):
            part = slice(i, i + 64)
            logits = self.model(self.xp.asarray(x[part]))
            total += float(cross_entropy(logits, self.xp.asarray(y[part]))) * len(x[part])
        return total / count

    def sample(self, length=240):
        """Text by the model, temperature 0.8. Each character sees the ``context`` ones before it."""
        rng = np.random.default_rng([self.args.seed, self.step, 1])
        ids = self.val[:1]
        for _ in range(length):
            view = self.xp.asarray(ids[None, -self.args.context :])
            logits = to_numpy(self.model(view)[0, -1]).astype(np.float64)
            ids = np.append(ids, rng.choice(len(logits), p=softmax(logits / 0.8)))
        return "".join(self.characters[i] for i in ids)

    def save(self):
        """Parameters, optimiser and step, to a temporary file that then takes the checkpoint's name."""
        tensors = {f"model.{name}": to_numpy(p) for name, p in self.model.named_parameters().items()}
        tensors |= {f"optimiser.{name}": to_numpy(a) for name, a in self.optimiser.state().items()}
        io.save(self.args.checkpoint, tensors, {"facts": json.dumps(self.facts), "step": str(self.step)})

    def load(self):
        """Go on from the checkpoint."""
        path = self.args.checkpoint
        if not path.exists():
            sys.exit(f"--resume: there is no checkpoint {path}")
        metadata = io.load_metadata(path)
        facts = json.loads(metadata["facts"])
        other = [f"{k} {facts.get(k)} (now {v})" for k, v in self.facts.items() if facts.get(k) != v]
        if other:
            sys.exit(f"--resume: {path} is of another run: {', '.join(other)}")
        tensors = io.load(path)

        def part(prefix):
            return {name.removeprefix(prefix): a for name, a in tensors.items() if name.startswith(prefix)}

        self.model.load_parameters(part("model."))
        self.optimiser.load_state(part("optimiser."))
        self.step = int(metadata["step"])


class Bar:
    """A progress line on a terminal; nothing elsewhere."""

    def __init__(self, run):
        self.run, self.start, self.first = run, time.perf_counter(), run.step
        self.shown, self.last = sys.stderr.isatty(), 0.0

    def show(self, loss):
        """Redraw, at most ten times a second."""
        now, args = time.perf_counter(), self.run.args
        if not self.shown or now - self.last < 0.1:
            return
        self.last = now
        done = self.run.step - self.first
        rate = done / (now - self.start)
        full = 24 * self.run.step // args.steps
        left = (args.steps - self.run.step) / rate
        print(
            f"\r{'█' * full}{'░' * (24 - full)} {self.run.step}/{args.steps}  loss {loss:.3f}  "
            f"{rate * args.batch * args.context:,.0f} tokens/s  {left // 60:.0f}:{left % 60:02.0f} left ",
            end="",
            file=sys.stderr,
            flush=True,
        )

    def clear(self):
        """Make room for an ordinary line."""
        if self.shown:
            print("\r" + " " * 90 + "\r", end="", file=sys.stderr, flush=True)


def main():
    """Train, validate, sample, save."""
    args = options()
    nn.keep_freed_memory()
    run = Run(args, read_text(args.text))
    if args.resume:
        run.load()
        print(f"resumed at step {run.step}")
    print(
        f"{len(run.train):,} characters to learn, {len(run.val):,} held out, {len(run.characters)} kinds; "
        f"{run.model.num_parameters():,} parameters"
    )
    stop = []
    before = signal.signal(signal.SIGINT, lambda *_: stop.append(True))  # a step is never cut in two
    bar, losses, busy = Bar(run), [], 0.0
    try:
        while run.step < args.steps and not stop:
            start = time.perf_counter()
            losses.append(run.advance())
            busy += time.perf_counter() - start
            bar.show(np.mean(losses[-50:]))
            if run.step % args.eval_every == 0 or run.step == args.steps:
                bar.clear()
                print(
                    f"step {run.step}  train {np.mean(losses[-100:]):.4f}  val {run.validate():.4f}  "
                    f"{1e3 * busy / len(losses):.1f} ms a step\n{run.sample()}\n",
                    flush=True,
                )
            if run.step % args.save_every == 0:
                run.save()
    finally:
        signal.signal(signal.SIGINT, before)
        bar.clear()
    run.save()
    if stop:
        print(f"stopped at step {run.step}; --resume goes on from {args.checkpoint}")


if __name__ == "__main__":
    main()
