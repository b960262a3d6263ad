"""Tests start beside plugins of pytest in other versions than those that make installs."""

# The words of pytest-benchmark 5.2.3, for every run in several processes.
WARNING = (
    "Benchmarks are automatically disabled because xdist plugin is active."
    "Benchmarks cannot be performed reliably in a parallelized environment."
)


def test_a_plugin_may_warn_that_benchmarks_are_off(root, python, tmp_path):
    plugin = tmp_path / "warning_plugin.py"
    plugin.write_text(
        f"import warnings\ndef pytest_configure():\n    warnings.warn({WARNING!r}, stacklevel=1)\n"
    )
    run = (
        f"import sys; sys.path.append({str(tmp_path)!r}); import pytest; pytest.main(sys.argv[1:])"
    )
    options = ("-p", "warning_plugin", "-p", "no:cacheprovider", "--collect-only", "--quiet")
    done = python("-c", run, *options, root / "tests/plan/test_plan.py")
    assert " tests collected in " in done.stdout
