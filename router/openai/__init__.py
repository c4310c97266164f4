"""OpenAI's API: request bodies, chat templates, parsers of model output, response encoders.

- :class:`~router.openai.request_handler.RequestHandler` handles one HTTP request: authentication,
  admission, body, errors. :class:`~router.openai.generation_handler.GenerationHandler` is its
  subclass for requests that generate answers, such as chat completions.
- :class:`~router.openai.context.RouterContext` has all components of a router that handlers need.
- :class:`~router.openai.preprocessor.Preprocessor` turns a body into prompts: chat template, token
  ids, grammar.
- :class:`~router.openai.choice_stream.ChoiceStream` turns the tokens of one answer into text
  deltas.
- :class:`~router.openai.inline_stream_writer.InlineStreamWriter` writes a token to the client
  without waking a task.
"""
