"""Steps compared with the plain model run microbatch by microbatch. See docs/verify.md."""
