"""T-tiny of the case list: the config of a Llama that tests of the engine, the weights and the server share."""

T_TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 264, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "torch_dtype": "float32", "eos_token_id": 262,
}  # fmt: skip
