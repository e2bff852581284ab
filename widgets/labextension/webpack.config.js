// Numbers would be made of the absolute paths of the sources, and the same sources in another folder would give
// other bytes. Names are relative.
module.exports = { optimization: { moduleIds: "named", chunkIds: "named" } };
