"""Fakes that several folders of tests share: a runner without a model, workers, and in-memory
implementations of what otherwise needs Redis, a network or shared memory."""
