# ensbridge on the CPU, with its core dependencies:
#   docker build --tag ensbridge .
#   docker run --rm --volume "$PWD:/data:ro" ensbridge predict zoo:cifar10 cat.png
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# An index of CPU builds of torch makes the image gigabytes smaller: --build-arg TORCH_INDEX=…
ARG TORCH_INDEX=""
COPY requirements-torch.txt /tmp/
RUN python -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} --requirement /tmp/requirements-torch.txt
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels python -m pip install --no-cache-dir /wheels/*.whl
RUN useradd --create-home ensbridge
USER ensbridge
WORKDIR /data
ENTRYPOINT ["ensbridge"]
CMD ["--help"]
