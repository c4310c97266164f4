"""Tokenizer, chat templates, incremental detokenization, stop strings, grammars. No module of
this package imports torch.

- :class:`~baton.text.tokenizer.Tokenizer` converts text to token ids and back.
- :class:`~baton.text.chat_template.ChatTemplate` renders chats.
- :class:`~baton.text.detokenizer.WindowDetokenizer` decodes token by token.
- :class:`~baton.text.stop_strings.StopStrings` cuts a streamed text before a stop string.
- ``grammar`` enforces the form of an answer.
"""
