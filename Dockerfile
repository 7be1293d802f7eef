# Trains, shows the monitor, and runs the GPU tests, as a user without rights. docs/install.md has the commands.
# Without a GPU:
#   docker build --build-arg BASE=ubuntu:24.04 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
ARG BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${BASE} AS build
ARG TORCH_INDEX=https://pypi.org/simple
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
       g++ cmake make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/offloadtrain
ENV PATH=/opt/offloadtrain/bin:$PATH PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY constraints.txt .
RUN pip install --extra-index-url "${TORCH_INDEX}" -c constraints.txt torch
COPY . .
RUN OFFLOADTRAIN_NATIVE=1 pip install -c constraints.txt ".[hf,data,web]" pytest pytest-xdist hypothesis

FROM ${BASE}
# gcc and headers: torch compiles the kernels of Adam over narrow state on a GPU when it first runs.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
       gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 trainer \
    && install --directory --owner=trainer --group=trainer /home/trainer/runs
COPY --from=build /opt/offloadtrain /opt/offloadtrain
COPY --from=build --chown=10001 /src/tests /home/trainer/tests
COPY --from=build --chown=10001 /src/benchmarks /home/trainer/benchmarks
COPY --from=build --chown=10001 /src/pyproject.toml /home/trainer/
ENV PATH=/opt/offloadtrain/bin:$PATH
USER 10001
WORKDIR /home/trainer
ENTRYPOINT ["offloadtrain"]
CMD ["--help"]
