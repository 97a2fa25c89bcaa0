"""What the plugin relies on in vLLM, held against what each supported release has."""
