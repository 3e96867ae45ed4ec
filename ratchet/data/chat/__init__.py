"""Messages to tokens: chat templates, tokenizers and tool-call formats."""
