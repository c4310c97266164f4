"""OpenAI's API: request bodies, chat templates, parsers of model output, response encoders."""
