# The image that `asa launch k8s` names where none is given:  docker build -t asa:latest .
# PyTorch brings its own CUDA libraries; the host needs only the driver and NVIDIA's container toolkit.
FROM python:3.12-slim

# Cutouts of a source tree have what is installed and nothing else.
COPY pyproject.toml README.md LICENSE MANIFEST.in CHANGELOG.md CITATION.cff constraints.txt /source/
COPY profiles /source/profiles
COPY asa /source/asa
RUN pip install --no-cache-dir '/source[train,parquet,tensorboard]' && rm -rf /source

# Plans, runs and data lie on the volume that is mounted here.
WORKDIR /work
CMD ["asa", "doctor"]
