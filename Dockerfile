# lockstep with the CUDA device; the driver comes from the host (docker run --gpus all --shm-size=1g -p 8000:8000 ...).
FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --profile dist --no-default-features --features cuda,serve

FROM nvidia/cuda:13.0.0-runtime-ubuntu24.04
COPY --from=build /src/target/dist/lockstep /usr/local/bin/lockstep
RUN useradd --system --create-home lockstep
USER lockstep
ENV XDG_CACHE_HOME=/home/lockstep/.cache
EXPOSE 8000
ENTRYPOINT ["lockstep"]
CMD ["serve", "--host", "0.0.0.0", "-m", "/models", "--device", "cuda"]
