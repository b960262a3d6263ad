"""Libraries of C++ keep the names of libstdc++ to themselves."""

import ctypes
from pathlib import Path

import pytest

from bench.shared_library import compile_library, compiler

# Its own function, and `std::ostream::operator<<(int)`, which it brings along.
TEXT, WRITE = "recorder_text", "_ZNSolsEi"
SOURCE = """
#include <sstream>
#include <string>
extern "C" const char* recorder_text(int number) {
    static std::string text;
    std::ostringstream out;
    out << number;
    text = out.str();
    return text.c_str();
}
"""


def test_a_toolchain_may_link_libstdcxx_statically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", " ".join([*compiler(), "-static-libstdc++"]))
    source, library = tmp_path / "text.cpp", tmp_path / "text.so"
    source.write_text(SOURCE)
    compile_library([source], library)
    loaded = ctypes.CDLL(str(library))
    text = getattr(loaded, TEXT)
    text.restype = ctypes.c_char_p
    assert text(17) == b"17"
    assert not hasattr(loaded, WRITE)
