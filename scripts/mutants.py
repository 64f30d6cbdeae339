"""Break the package in one place at a time, and see that the tests notice.

    python scripts/mutants.py            all mutations
    python scripts/mutants.py wave pull  those whose name contains one of the words

Each mutation is applied to a copy of the package in a temporary folder, where its tests run. The
exit status is 1 when the tests fail without a mutation, or pass with one.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "moonep_megatron",
    "kernels",
    "tests",
    "scripts",
    "configs",
    "pyproject.toml",
    "README.md",
)
LIMIT_S = 600


def main() -> int:
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        print(f"no mutation has one of {words} in its name")
        return 1
    # Texts first: a mutation that no longer applies must not cost an hour to find out.
    for mutation in chosen:
        mutated_text(mutation)
    print("without a mutation: ", end="", flush=True)
    failed, seconds = run_tests(None, sorted({m.tests for m in chosen}))
    if failed:
        print(f"the tests fail already: {', '.join(failed)}")
        return 1
    print(f"all tests pass, {seconds:.0f} s")
    survivors = [mutation.name for mutation in chosen if not caught(mutation)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations caught")
    if survivors:
        print("SURVIVED: " + ", ".join(survivors))
    return 1 if survivors else 0


def caught(mutation: Mutation) -> bool:
    """Run a mutation's tests on the mutated copy and print what noticed."""
    print(f"{mutation.name}: ", end="", flush=True)
    failed, seconds = run_tests(mutation, [mutation.tests])
    if not failed:
        print(f"SURVIVED {mutation.tests}")
        return False
    print(f"caught by {', '.join(failed)}, {seconds:.0f} s")
    return True


def mutated_text(mutation: Mutation) -> str:
    """The whole file with the mutation in it.

    Raises:
        SystemExit: the old text does not occur exactly once.
    """
    text = (ROOT / "moonep_megatron" / mutation.file).read_text()
    found = text.count(mutation.old)
    if found != 1:
        raise SystemExit(
            f"mutation '{mutation.name}' does not apply: its text occurs {found} times in "
            f"moonep_megatron/{mutation.file}; bring scripts/mutations.py up to date"
        )
    return text.replace(mutation.old, mutation.new)


def run_tests(mutation: Mutation | None, tests: list[str]) -> tuple[list[str], float]:
    """Run tests in a copy, up to the first failure; what failed, and the seconds it took."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        copy_to(Path(folder))
        if mutation is not None:
            (Path(folder) / "moonep_megatron" / mutation.file).write_text(mutated_text(mutation))
        # -m puts the folder first on the path, before any installed copy of the package.
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *tests],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LIMIT_S * len(tests),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return ["the time limit"], time.monotonic() - start
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if not failed and done.returncode not in (0, 1):
        raise SystemExit(f"pytest did not run:\n{done.stdout}\n{done.stderr}")
    return failed, time.monotonic() - start


def copy_to(folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)


if __name__ == "__main__":
    sys.exit(main())
