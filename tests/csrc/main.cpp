// All tests run on the fake driver, by its own path.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "cuda/driver.hpp"

int main(int argc, char** argv) {
    pykern::cuda::use_library(PYKERN_FAKE_DRIVER);
    return doctest::Context(argc, argv).run();
}
