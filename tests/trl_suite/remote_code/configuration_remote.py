from transformers import LlamaConfig


class RemoteConfig(LlamaConfig):
    model_type = "remote"
