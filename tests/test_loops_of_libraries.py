"""docs/loops.md: the loops of other libraries, before and after its changes."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import flockstep as fs

# One process of xdist imports the libraries, which takes seconds.
pytestmark = [
    pytest.mark.xdist_group("loops of libraries"),
    # Of Lightning's own use of torch.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:DeprecationWarning"),
    # Data sets of a few samples need no more processes.
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

PAGE = Path(__file__).parents[1] / "docs" / "loops.md"
GENERATOR = torch.Generator().manual_seed(3)
POINTS = torch.randn(33, 4, generator=GENERATOR), torch.randint(2, (33,), generator=GENERATOR)
TEXT = torch.randint(11, (33, 8), generator=GENERATOR)

ACCUMULATE = 2
LIBRARIES = ["Hugging Face Trainer", "Accelerate", "Lightning"]
of_every_library = pytest.mark.parametrize("library", LIBRARIES)


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """Imported before any test, offline, by one thread: they change the environment."""
    with pytest.MonkeyPatch.context() as changes:
        changes.setenv("HF_HUB_OFFLINE", "1")
        import accelerate  # noqa: F401
        import lightning.pytorch  # noqa: F401
        import transformers.models.gpt2.modeling_gpt2
        import transformers.trainer  # noqa: F401

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as a simulated worker: sums depend on it
        yield
        torch.set_num_threads(threads)


def code_of(library: str, is_after: bool) -> str:
    """The program that the page shows, before its change or after."""
    section = PAGE.read_text().split(f"## {library}\n")[1]
    lines = re.findall(r"```diff\n(.*?)```", section, flags=re.DOTALL)[0].splitlines()
    left_out = "-" if is_after else "+"
    return "\n".join(line[1:] for line in lines if not line.startswith(left_out))


def names_for(library: str, strategy: fs.Strategy | None, folder: str) -> dict[str, object]:
    """What the program takes for granted."""
    names = {
        "fs": fs,
        "torch": torch,
        "nn": nn,
        "DataLoader": DataLoader,
        "cross_entropy": cross_entropy,
        "strategy": strategy,
        "dataset": TensorDataset(*POINTS),
    }
    if library == "Accelerate":
        from accelerate import Accelerator

        return {**names, "Accelerator": Accelerator}
    if library == "Lightning":
        from lightning.pytorch import LightningModule, Trainer

        quiet = dict.fromkeys(
            ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
        )
        arguments = {
            **quiet,
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 2,
            "accumulate_grad_batches": ACCUMULATE,
            "gradient_clip_val": 0.5,
            "default_root_dir": folder,
        }
        return {
            **names,
            "LightningModule": LightningModule,
            "Trainer": Trainer,
            "arguments": arguments,
        }
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        gradient_accumulation_steps=ACCUMULATE,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    config = GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return {
        **names,
        "GPT2LMHeadModel": GPT2LMHeadModel,
        "Trainer": Trainer,
        "config": config,
        "arguments": arguments,
        "dataset": [{"input_ids": row, "labels": row} for row in TEXT],
    }


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run(library, folder, strategy=None, comm=None):
    """The model that the page's program gives, and the batches that it has seen."""
    torch.manual_seed(0)
    names = names_for(library, strategy, folder)
    exec(code_of(library, is_after=comm is not None), names)
    seen, thread = [], threading.get_ident()

    def see(module, inputs):
        is_first = (
            getattr(module, "num_embeddings", 0) == 11 or getattr(module, "in_features", 0) == 4
        )
        if is_first and threading.get_ident() == thread:  # simulated workers are threads
            seen.append(inputs[0].clone())

    with nn.modules.module.register_module_forward_pre_hook(see):
        model = names["train"]() if comm is None else names["train"](comm)
    return flat(model), seen


@of_every_library
def test_one_worker_trains_as_the_plain_loop(library, tmp_path):
    """Bit for bit: with accumulation, clipping and the schedule of the library."""
    plain, batches = run(library, tmp_path)
    ((ours, seen),) = fs.launch(lambda comm: run(library, tmp_path, fs.SyncSGD(), comm), 1)
    assert len(batches) == len(seen) == (9 if library == "Accelerate" else 18)
    assert torch.equal(ours, plain)


def by_hand(library, strategy, comm, batches):
    """A plain loop with `worker.step` over the same batches."""
    torch.manual_seed(0)
    if library == "Hugging Face Trainer":
        names = names_for(library, strategy, "")
        model, rate = names["GPT2LMHeadModel"](names["config"]), 0.01
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    else:
        model, rate = nn.Linear(4, 2), 0.1
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    worker = fs.Worker(comm, model, optimizer, strategy)

    per_step = 1 if library == "Accelerate" else ACCUMULATE
    epochs = [batches] if library == "Accelerate" else [batches[:5], batches[5:]]
    for epoch, of_epoch in enumerate(epochs):
        for start in range(0, len(of_epoch), per_step):
            losses = []
            for x in of_epoch[start : start + per_step]:
                if library == "Hugging Face Trainer":
                    # What Trainer counts of each row: all its tokens.
                    items = 8 * sum(map(len, of_epoch[start : start + per_step]))
                    loss = model(x, labels=x, num_items_in_batch=torch.tensor(items)).loss
                else:
                    loss = cross_entropy(model(x), label_of(x)) / per_step
                loss.backward()
                losses.append(loss)

            if library == "Hugging Face Trainer":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.param_groups[0]["lr"] = rate * (1 - worker.steps / 6)
                worker.step(sum(losses))
            elif library == "Lightning":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.param_groups[0]["lr"] = rate * 0.5**epoch
                worker.step(losses[-1])
            else:
                worker.step(losses[-1])
    return flat(worker.finish())


def label_of(x):
    points, labels = POINTS
    return torch.stack([labels[(points == point).all(1)][0] for point in x])


@pytest.mark.parametrize("strategy", [fs.SyncSGD(), fs.LocalSGD(2), fs.BestOnly(2)], ids=str)
@of_every_library
def test_two_workers_train_as_a_loop_with_worker_step(library, strategy, tmp_path):
    trained = fs.launch(lambda comm: run(library, tmp_path, strategy, comm), 2)
    expected = fs.launch(lambda comm: by_hand(library, strategy, comm, trained[comm.rank][1]), 2)
    first, second = (torch.cat([batch.flatten() for batch in seen]) for _, seen in trained)
    assert len(first) == len(second)
    assert not torch.equal(first, second)
    for (ours, _), theirs in zip(trained, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_real_processes_give_what_the_simulator_gives(local, tmp_path):
    """All libraries in one launch: each process imports them once."""

    def program(comm):
        import warnings

        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        strategy = fs.LocalSGD(2)
        return [run(library, str(tmp_path), strategy, comm)[0] for library in LIBRARIES]

    for simulated, real in zip(fs.launch(program, 2), fs.launch(program, 2, local), strict=True):
        assert all(map(torch.equal, simulated, real))
