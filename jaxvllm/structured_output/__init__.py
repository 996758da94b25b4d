"""Structured output: a request's text follows a JSON schema, a regex, a choice or a grammar, through llguidance.

The front end checks what a request asks for (`check`); the core compiles it and follows it token by token
(`GrammarManager`), each in threads of its own, and the step's sampler masks what may not come next.
"""
