# Dockerfile - train_gpt on a CPU, in Debian 12
#   docker build -t train_gpt . && docker run --rm -it train_gpt      (podman takes the same words)
#   docker run --rm train_gpt make test                               the tests
# The programs are for the processor that builds them: `make OPT="-O3 -march=x86-64-v3"` is for all of ten years.
# On GPUs: FROM nvidia/cuda:12.6.3-devel-ubuntu24.04 or a later one, `make DEVICE=cuda`, and docker run --gpus all.
FROM debian:12
RUN apt-get update && apt-get install -y --no-install-recommends git make ca-certificates && rm -rf /var/lib/apt/lists/*
WORKDIR /train_gpt
COPY . .
RUN scripts/setup.sh test && make -j"$(nproc)" all
CMD ["make", "run"]
