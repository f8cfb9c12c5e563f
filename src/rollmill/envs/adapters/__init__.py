"""envs/adapters"""
