//! What is known of a graph while somebody else has it.

use std::sync::Arc;

use super::{Built, Graph};

/// What the services of a [`Graph`] know, for others than who has it. They, and what they are over, are there as long as this is.
#[derive(Clone)]
pub struct Watch {
    root: Arc<Built>,
}

impl Graph {
    /// For who asks while the graph is being changed.
    pub fn watch(&self) -> Watch {
        Watch { root: Arc::clone(&self.root) }
    }
}

impl Watch {
    /// See [`Graph::out_of_use`].
    pub fn out_of_use(&self) -> Vec<String> {
        let nodes = Built::nodes(&self.root);
        let unused = nodes.iter().flat_map(|node| node.legs.iter().enumerate().filter(|(at, _)| !node.uses(*at)));
        unused.map(|(_, leg)| leg.node.to_string()).collect()
    }

    /// See [`Graph::has_untold`].
    pub fn has_untold(&self) -> bool {
        Built::nodes(&self.root).iter().any(|node| node.has_untold())
    }
}
