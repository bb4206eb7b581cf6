# swarmnode in a container: any of its commands, as a user without rights, on CPUs or NVIDIA GPUs.
#
#   docker build -t swarmnode .                                   for CPUs
#   docker build -t swarmnode:cuda --build-arg TORCH=cuda .       for NVIDIA GPUs; run it with --gpus all
#   docker run -d --name node --stop-timeout 30 -v swarmnode:/var/lib/swarmnode --env-file node.env swarmnode run
#
# node.env, which only you can read (chmod 600), has the line SWARMNODE_INVITE=swarm2…: other users can read a command line.
#
# `run` and `host` are watched by the health check at the end of this file. More in docs/operator.md.

FROM debian:bookworm-slim AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*
# Two environments: one that builds and installs, and one that is taken along, without pip in it.
RUN python3 -m venv /build && python3 -m venv --without-pip /opt/swarmnode
WORKDIR /src
COPY pyproject.toml README.md LICENSE contrib/docker/requirements.txt contrib/docker/torch.txt contrib/docker/build.txt ./
COPY swarmnode swarmnode
RUN /build/bin/pip install --require-hashes --no-deps -r build.txt \
    && /build/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /dist .
# cuda: PyPI's build of torch, for CUDA 13. Else a folder of https://download.pytorch.org/whl/ (cpu, cu126) with the same version, which is
# checked against that server's own index alone: its hashes are not PyPI's. Everything else is by the hashes of contrib/docker/lock.py.
# What only developers and other devices use is a fifth of it all, and goes.
ARG TORCH=cpu
RUN --mount=type=cache,target=/root/.cache/pip \
    install() { /build/bin/pip --python /opt/swarmnode/bin/python install "$@"; } \
    && install --require-hashes --no-deps -r requirements.txt \
    && if [ ${TORCH} = cuda ]; then install --require-hashes --no-deps -r torch.txt; \
        else install --index-url https://download.pytorch.org/whl/${TORCH} $(grep -o '^torch==[0-9.]*' torch.txt); fi \
    && install --no-deps /dist/*.whl \
    && cd /opt/swarmnode/lib/python3*/site-packages \
    && rm -rf torch/include torch/test torch/bin/*[Tt]est* torch/bin/protoc* bitsandbytes/*_rocm* bitsandbytes/*_xpu* \
    && if [ ${TORCH} = cpu ]; then rm bitsandbytes/*_cuda*; fi

FROM debian:bookworm-slim
# tini is the first process: it passes signals on, and takes care of what a node's p2pd leaves behind. /invites and /page are for
# volumes that containers share.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /var/lib/swarmnode --create-home --shell /usr/sbin/nologin swarmnode \
    && install --directory --owner=swarmnode /invites /page
COPY --from=build /opt/swarmnode /opt/swarmnode
# Metrics stay inside the container until SWARMNODE_METRICS_HOST says 0.0.0.0. The NVIDIA variables ask the container
# toolkit for the driver; without it nothing reads them.
ENV PATH=/opt/swarmnode/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SWARMNODE_HOME=/var/lib/swarmnode/home \
    SWARMNODE_METRICS_HOST=127.0.0.1 \
    SWARMNODE_METRICS_PORT=9464 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER swarmnode
# Identity, fetched weights, .swarm files, and what comes from a hub.
WORKDIR /var/lib/swarmnode
VOLUME /var/lib/swarmnode
# The figures are read on the node's event loop: one that hangs does not answer.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as web; web.urlopen('http://{SWARMNODE_METRICS_HOST}:{SWARMNODE_METRICS_PORT}/metrics'.format_map(os.environ), timeout=8)"]
ENTRYPOINT ["tini", "--", "swarmnode"]
CMD ["--help"]
