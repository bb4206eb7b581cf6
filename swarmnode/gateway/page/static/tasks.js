// Uses of models that cannot chat.

const OTHERS = {
  embed: "It turns a text into a vector. Programs call it at /v1/embeddings.",
  classify: "It classifies texts. Programs call it at /classify.",
  infer: "It is a module that turns arrays into arrays. Use it by swarmnode infer, or from Python.",
  train: "It is a module in training: it does not answer yet.",
};

/** Return the use of such a model; null for a model that generates text, or if the task is unknown. */
export const otherTask = (task) => OTHERS[task] ?? null;
