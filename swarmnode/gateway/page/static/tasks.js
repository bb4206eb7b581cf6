// What models are for that do not converse.

const OTHERS = {
  embed: "It makes a vector of a text. Programs ask for it at /v1/embeddings.",
  classify: "It tells the class of a text. Programs ask for it at /classify.",
  infer: "It is a module, from arrays to arrays. It is asked by swarmnode infer, or from Python.",
  train: "It is a module that is being trained: it answers nobody.",
};

/** What such a model does; null for one that generates text, or while that is not known. */
export const otherTask = (task) => OTHERS[task] ?? null;
