"""GenAC studies: does a critic that reasons know more, and does its actor learn more?"""
