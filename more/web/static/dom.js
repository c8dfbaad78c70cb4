// A page's elements: by their id, and new ones.

export class Problem extends Error {} // one sentence for the reader

export const get = (id) => document.getElementById(id);

export const make = (kind, properties = {}, ...inside) => {
  const element = Object.assign(document.createElement(kind), properties);
  element.append(...inside);
  return element;
};
