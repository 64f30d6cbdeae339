"""scripts/plot_balance.py: values that Megatron's own code logged, the picture, bad input."""

import builtins
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import Case, batch
from moe import build
from ranks import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import plot_balance
from balance_log.figure import figure
from balance_log.read import DRAWN, LogError, read

from moonep_megatron.metrics import TRACKED

CASE = Case(
    name="", experts=8, routing=("hot_expert", "uniform"), moonep=(("log_maxvio", True),), hidden=8
)
# How Megatron's training loop begins and ends the line that its MoE metrics stand in.
LINE = (
    " [2026-12-01 12:05:58.640675] iteration {:8d}/{:8d} | consumed samples:           64 |"
    " elapsed time per iteration (ms): 1798.3 | learning rate: 2.000000E-04 | lm loss: 6.376E+00 |"
    "{} loss scale: 1.0 | grad norm: 3.616 | number of nan iterations:   0 |\n"
)


class Writer:
    """Keeps what it is told to write, and hands it on to TensorBoard's where there is one."""

    def __init__(self, folder: str) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.files = SummaryWriter(folder)
        except ImportError:
            self.files = None

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = float(value)
        if self.files:
            self.files.add_scalar(name, value, step)
            self.files.flush()


def _train(folder: str) -> SimpleNamespace:
    """Two iterations, a hot one and an even one, of a model whose first layer is dense."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    layer = build(CASE, "moonep")
    layer.set_layer_number(2)
    layer.config.num_layers = 2
    rank = torch.distributed.get_rank()
    writer = Writer(f"{folder}/{rank}")
    texts = []
    for iteration in (1, 2):
        layer.router.microbatch = iteration - 1
        layer(batch(CASE, iteration - 1, rank).tokens_sH[:, None])
        text = get_moe_metrics_tracker().report(
            loss_scale=1.0,
            iteration=iteration,
            writer=writer,
            per_layer_logging=True,
            num_layers=2,
            moe_layer_freq=[0, 1],
        )
        texts.append(LINE.format(iteration, 2, text))
    return SimpleNamespace(texts=texts, scalars=writer.scalars)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("events")
    one, _ = run_ranks(2, _train, str(folder))
    return SimpleNamespace(folder=folder / "0", **vars(one))


@pytest.fixture
def log(run: SimpleNamespace, tmp_path: Path) -> Path:
    path = tmp_path / "log.txt"
    path.write_text("[rank1] noise\n".join(["", *run.texts, ""]))
    return path


def test_values_of_a_console_log(run: SimpleNamespace, log: Path) -> None:
    balance = read(log)
    assert balance.iterations == [1, 2] and not balance.layers and not balance.skipped
    assert set(balance.means) == set(TRACKED)
    for name, values in balance.means.items():
        logged = [run.scalars[name, iteration] for iteration in (1, 2)]
        assert values == pytest.approx(logged, abs=0.006)
    hot, even = balance.means["moonep_hottest_rank_without"]
    assert hot > even + 0.1 and balance.means["moonep_duplicates"][0] > 0


def test_values_of_event_files(run: SimpleNamespace) -> None:
    pytest.importorskip("tensorboard")
    balance = read(run.folder)
    assert balance.iterations == [1, 2] and balance.layers == [1]  # 0 is dense
    for name in TRACKED:
        logged = [run.scalars[name, iteration] for iteration in (1, 2)]
        assert balance.means[name] == pytest.approx(logged, rel=1e-6)
        assert balance.layer_values[name][:, 0] == pytest.approx(logged, rel=1e-6)
    (file,) = run.folder.iterdir()
    assert read(file).means == balance.means


def test_table_and_picture(run: SimpleNamespace, log: Path, capsys) -> None:
    png = log.parent / "new" / "balance.png"
    assert plot_balance.main([str(log), "--png", str(png)]) == 0
    printed = capsys.readouterr().out
    assert "2 iterations, 1 to 2" in printed and "Wrote" in printed
    hot = f"{run.scalars['moonep_hottest_rank_without', 1]:.2f}"
    assert [hot in line for line in printed.splitlines() if "rank_without" in line] == [True]
    assert png.read_bytes().startswith(b"\x89PNG")


def test_every_logged_value_is_explained() -> None:
    assert set(plot_balance.MEANING) == set(TRACKED) > set(DRAWN)
    assert set(plot_balance.OF_LAYERS) < set(TRACKED)


def test_panels_show_the_values(log: Path) -> None:
    balance = read(log)
    panels = figure(balance).axes
    lines = [line for axes in panels for line in axes.lines]
    for name, line in zip(DRAWN, lines, strict=True):
        assert list(line.get_xdata()) == [1, 2] and list(line.get_ydata()) == balance.means[name]
    assert [text.get_text() for text in panels[0].get_legend().texts] == [
        "without moonep",
        "with moonep",
    ]


def _layers(iterations: list[int]) -> dict[str, SimpleNamespace]:
    """What TensorBoard would read: 13 layers, the first one dense."""
    tags = {name: [SimpleNamespace(step=i, value=1.0) for i in iterations] for name in TRACKED}
    for name in TRACKED:
        for layer in range(13):
            tags[f"moe/{name}_layer_{layer}"] = [
                SimpleNamespace(step=i, value=0.0 if layer == 0 else layer + i / 100)
                for i in iterations
            ]
    return tags


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A folder whose event files hold ``tags``; stands in for TensorBoard."""
    found = SimpleNamespace(folder=tmp_path / "tb", tags={})

    class EventAccumulator:
        def __init__(self, path: str, size_guidance: dict[str, int]) -> None:
            assert path == str(found.folder) and size_guidance == {"scalars": 0}
            self.Scalars = found.tags.get

        def Reload(self) -> None: ...

        def Tags(self) -> dict[str, list[str]]:
            return {"scalars": list(found.tags)}

    for name in ("tensorboard", "tensorboard.backend", "tensorboard.backend.event_processing"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    name = "tensorboard.backend.event_processing.event_accumulator"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(EventAccumulator=EventAccumulator))
    found.folder.mkdir()
    (found.folder / "events.out.tfevents.1").touch()
    return found


@pytest.mark.parametrize("iterations", [[5], [1, 2, 10]])
def test_map_of_layers(events: SimpleNamespace, iterations: list[int], capsys) -> None:
    events.tags = _layers(iterations)
    balance = read(events.folder)
    assert balance.layers == list(range(1, 13))
    axes = figure(balance).axes[3]
    (mesh,) = axes.collections
    expected = [[layer + i / 100 for i in iterations] for layer in range(1, 13)]
    assert np.allclose(mesh.get_array(), expected)
    # Cells as wide as there is room, also for a lone iteration.
    x = mesh.get_coordinates()[0, :, 0]
    assert x.tolist() == ([4.5, 5.5] if iterations == [5] else [0.5, 1.5, 6.0, 14.0])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "3", "5", "7", "9", "11"]
    assert plot_balance.main([str(events.folder), "--png", str(events.folder / "x.png")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    mean = 12 + sum(iterations) / len(iterations) / 100
    most = 12 + iterations[-1] / 100
    assert ["12", *[f"{mean:.2f}"] * 5, f"{most:.2f}"] in rows


def test_layers_logged_later_leave_gaps(events: SimpleNamespace) -> None:
    events.tags = _layers([1, 2])
    for name in [name for name in events.tags if name.startswith("moe/")]:
        del events.tags[name][0]
    values = read(events.folder).layer_values["moonep_maxvio"]
    assert np.isnan(values[0]).all() and values[1] == pytest.approx(np.arange(1, 13) + 0.02)


def test_a_resumed_run_counts_once_and_partial_lines_are_told(log: Path, capsys) -> None:
    text = log.read_text()
    (second,) = [line for line in text.splitlines() if "iteration        2" in line]
    later = second.replace("moonep_maxvio: ", "moonep_maxvio: 7")
    torn = second.replace("iteration        2", "iteration        3").replace(
        "moonep_maxvio: ", "moonep_maxvio: [rank1] "
    )
    log.write_text("\n".join([text, later, torn, ""]))
    balance = read(log)
    assert balance.iterations == [1, 2] and balance.skipped == 1
    assert balance.means["moonep_maxvio"][1] >= 70
    assert plot_balance.main([str(log), "--png", str(log.with_suffix(".png"))]) == 0
    assert "Iterations left out, a value not there: 1" in capsys.readouterr().out


def test_bad_input_is_named(log: Path, tmp_path: Path, capsys) -> None:
    text = log.read_text()
    without = "".join(LINE.format(i, 2, "") for i in (1, 2))
    zeros = "".join(f" {name}: 0.00 |" for name in TRACKED)
    some = LINE.format(1, 2, " moonep_maxvio: 1.00 |")
    (tmp_path / "folder").mkdir()
    assert "moonep_hottest_rank: 1.00" in text
    for name, content, problem in (
        ("missing", None, "no such file or folder"),
        ("empty", "", "the file is empty"),
        ("other", "hello\n", "no iteration lines of Megatron's training loop"),
        ("without", without, "train with --moe-token-dispatcher-type moonep --moe-moonep-log-max"),
        ("zeros", LINE.format(1, 2, zeros), "is always 0: no layer used moonep"),
        ("some", some, "moonep_hottest_rank_without, moonep_hottest_rank, moonep_duplicates never"),
        (
            "nan",
            text.replace("moonep_hottest_rank: 1.00", "moonep_hottest_rank: nan"),
            "moonep_hottest_rank is nan at iteration 1",
        ),
        ("folder", None, "no event files (*tfevents*) in this folder"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        png = tmp_path / f"{name}.png"
        assert plot_balance.main([str(path), "--png", str(png)]) == 2
        said = capsys.readouterr().err
        assert f"plot_balance.py: {path}: " in said and problem in said
        assert not png.exists()


def test_values_that_are_no_numbers_in_a_layer(events: SimpleNamespace) -> None:
    events.tags = _layers([1, 2])
    events.tags["moe/moonep_busiest_layer_3"][1].value = float("inf")
    with pytest.raises(LogError, match="moonep_busiest of layer 3 is inf at iteration 2"):
        read(events.folder)


def test_event_files_need_tensorboard(events: SimpleNamespace, monkeypatch, capsys) -> None:
    actual = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("tensorboard"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return actual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert plot_balance.main([str(events.folder)]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err
