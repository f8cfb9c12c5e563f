# Rollmill on CPUs:
#     docker build --tag rollmill .
#     docker run --rm --volume "$PWD/runs:/home/trainer/runs" rollmill train ppo CartPole-v1
FROM python:3.12-slim

RUN useradd --create-home trainer
WORKDIR /opt/rollmill
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip install --no-cache-dir '.[cluster,fusion,gymnax,mujoco,onnx,optuna,pgx,serve,store]'

USER trainer
WORKDIR /home/trainer
ENTRYPOINT ["rollmill"]
CMD ["--help"]
