# An image with the GPU environment: CUDA 13's compiler, Python 3.12, and what scripts/locks/ names, by hash.
#
#   docker build -t sleuth .                          # about 30 GB; no GPU is needed for it
#   docker build -t sleuth --build-arg SETUP=--te .   # with TransformerEngine, which is compiled: takes long
#   docker run --gpus all --ipc host --shm-size 32g --ulimit memlock=-1 -v "$PWD/models:/sleuth/models" -it sleuth
#
# Engines and trainer hand tensors to each other through shared memory, hence --ipc and --shm-size.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /sleuth
ENV CUDA_HOME=/usr/local/cuda

# First what changes seldom: a change of the code does not install anew.
COPY scripts/setup_gpu.sh scripts/
COPY scripts/locks scripts/locks
ARG SETUP=
RUN SKIP_DRIVER_CHECK=1 PIP_NO_CACHE_DIR=1 PYTHON=python3.12 bash scripts/setup_gpu.sh $SETUP

COPY . .
ENV PATH=/sleuth/.venv-gpu/bin:$PATH
CMD ["bash"]
