"""Dockerfiles: what is in them, and what follows from that; no daemon is asked here.

    reading     text -> instructions: directives, comments, continuations, heredocs, flags
    words       variables in a word, and its quotes
    stages      instructions -> stages; what is not supported is refused here
    settings    what an instruction changes of the image's configuration
    ignore      .dockerignore
    context     which files of the build context a COPY means, and their digests
    plan        stages -> steps, each with the key under which its result is cached

Everything that is wrong with a Dockerfile is an `InvalidRequest` that begins with file and line.
"""
