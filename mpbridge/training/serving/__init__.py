"""Weights beyond a run, tensor by tensor and without a model: conversion between checkpoints and folders in Hugging Face's layout, folders quantized as engines serve them, and folders
compared with what training computed with."""
