# syntax=docker/dockerfile:1
# One image, two variants. The wheels of PyTorch bring the CUDA libraries, so both stand on the same Debian.
#   make image              # or by hand, with docker, buildah or podman alike:
#   docker build --build-arg VARIANT=cpu  --tag slipstream:0.1.0-cpu  .
#   docker build --build-arg VARIANT=cuda --tag slipstream:0.1.0-cuda .
# Behind mirrors: REGISTRY has the image of Python, TORCH_INDEX PyTorch, PIP_INDEX_URL all other packages. What has a
# password goes into a file of pip's settings instead, which no layer keeps: --secret id=pip,src=$HOME/.config/pip/pip.conf
ARG REGISTRY=docker.io/library
ARG PYTHON=3.11

FROM ${REGISTRY}/python:${PYTHON}-slim-bookworm AS python
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore

# Everything but the server: gigabytes that change only with pyproject.toml.
FROM python AS requirements
ARG VARIANT=cpu
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX
ARG PIP_INDEX_URL
WORKDIR /src
COPY pyproject.toml .
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; o = p['optional-dependencies']; \
    extras = ['quantization', 'grammar', 'vision', 'gateway', 'otel'] + ['cuda', 'nixl'] * ('${VARIANT}' == 'cuda'); \
    print(*p['dependencies'], *(each for extra in extras for each in o[extra]), sep='\n')" > requirements.txt
# Without an index of its own the CUDA variant's PyTorch comes from where everything else comes from.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf python -m venv /opt/slipstream \
    && case "${VARIANT}" in \
         cpu) index=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu} ;; \
         cuda) index=${TORCH_INDEX} ;; \
         *) echo "VARIANT is cpu or cuda" >&2; exit 1 ;; \
       esac \
    && /opt/slipstream/bin/pip install ${index:+--index-url "${index}"} "${TORCH}" \
    && /opt/slipstream/bin/pip install --requirement requirements.txt

FROM python AS wheel
ARG PIP_INDEX_URL
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY service service
RUN --mount=type=secret,id=pip,target=/etc/pip.conf pip wheel --no-deps --wheel-dir /dist .

# Laid out below /server as it will lie in the image. Not installed by a mount of the wheel there: podman and buildah take
# such a step from their cache whatever the wheel holds, and the image would have the server of the build before.
FROM requirements AS server
COPY --from=wheel /dist /dist
RUN /opt/slipstream/bin/pip install --no-deps --no-index --root /server /dist/*.whl

FROM python AS image
# tini, because the kernel ignores a SIGTERM to process 1 that has no handler yet; the compiler, because the decoder of
# the CPU is built for the processor it runs on, and Triton builds its launchers.
# Upgraded, because images of Python are made less often than Debian mends its packages.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get upgrade --yes \
    && apt-get install --yes --no-install-recommends tini g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin slipstream \
    && install --directory --owner slipstream --group slipstream --mode 0700 /cache
COPY --from=requirements /opt/slipstream /opt/slipstream
# A layer of its own, and a small one: what a new version of the server has to pull.
COPY --from=server /server/opt/slipstream /opt/slipstream
# The driver's libraries come from the node. Which devices are seen is not said here: with NVIDIA's runtime as a node's
# default one, "all" would give every GPU to pods that asked for none.
ENV PATH=/opt/slipstream/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    SLIPSTREAM_CACHE_DIR=/cache \
    HF_HUB_OFFLINE=1 \
    HF_HUB_DISABLE_TELEMETRY=1
LABEL org.opencontainers.image.title="slipstream" \
      org.opencontainers.image.licenses="Apache-2.0"
# By number, so that a kubelet can see that it is not root.
USER 10001:10001
WORKDIR /tmp
EXPOSE 50051 9464
HEALTHCHECK --interval=10s --timeout=10s --start-period=10m CMD ["slipstream", "health"]
ENTRYPOINT ["tini", "--", "slipstream"]
CMD ["serve", "--host=0.0.0.0", "--metrics-host=0.0.0.0"]
