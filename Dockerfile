# numdev with the CPU build of torch. For CUDA, give --build-arg TORCH=https://download.pytorch.org/whl/cu130
FROM python:3.12-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir torch --index-url "$TORCH"
RUN --mount=from=wheel,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
WORKDIR /work
ENTRYPOINT ["numdev"]
CMD ["--help"]
