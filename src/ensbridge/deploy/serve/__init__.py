"""A model behind HTTP: the Open Inference Protocol v2, `/v1/predict` for people, metrics and a page.

`ensbridge serve` starts it; it needs the extra `serve`. Requests are batched over a few milliseconds and all
models compute in one thread. Nothing that a request holds is executed, and everything it can ask for has a
limit.
"""
