//! Files and folders that are not whole yet. They stand beside the place where they belong and move there at once; whatever
//! ends the run before that, an error, a signal or a full disk, they go.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is being written in this process. `None` once all of it was removed because the process ends.
static OPEN: Mutex<Option<Vec<PathBuf>>> = Mutex::new(Some(Vec::new()));

fn open() -> MutexGuard<'static, Option<Vec<PathBuf>>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A path at which something is being made. It is removed when this goes, unless it was published.
#[derive(Debug)]
pub struct Partial(PathBuf);

impl Partial {
    /// Takes the path; it is made by the caller, for whom it must be free.
    ///
    /// # Errors
    /// What `make` says, and an interruption.
    pub fn create<T>(path: PathBuf, make: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<(Self, T)> {
        let mut open = open();
        let Some(paths) = open.as_mut() else { return Err(io::ErrorKind::Interrupted.into()) };
        let made = make(&path)?;
        paths.push(path.clone());
        Ok((Partial(path), made))
    }

    /// Where it is until then.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Moves it to where it belongs.
    ///
    /// # Errors
    /// What the file system says; it is removed then.
    pub fn publish(self, to: &Path) -> io::Result<()> {
        let mut open = open();
        let Some(paths) = open.as_mut() else { return Err(io::ErrorKind::Interrupted.into()) };
        std::fs::rename(&self.0, to)?;
        paths.retain(|p| *p != self.0);
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if let Some(paths) = open().as_mut()
            && let Some(at) = paths.iter().position(|p| *p == self.0)
        {
            remove(&paths.swap_remove(at));
        }
    }
}

fn remove(path: &Path) {
    // Whatever led here is the error to be told, not that this failed.
    let _ = if path.is_dir() { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
}

/// Removes all that is not whole, because the process is about to end. Nothing new is begun or published after that.
pub fn remove_all() {
    for path in open().take().unwrap_or_default() {
        // A thread that still writes into the folder may make a file while it is being emptied.
        (0..10).take_while(|_| path.symlink_metadata().is_ok()).for_each(|_| remove(&path));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_published_goes() {
        let folder = tempfile::tempdir().expect("a folder");
        let (part, to) = (folder.path().join("part"), folder.path().join("whole"));
        let (partial, ()) = Partial::create(part.clone(), |p| std::fs::write(p, "x")).expect("free");
        drop(partial);
        assert!(!part.exists());
        let (partial, ()) = Partial::create(part.clone(), |p| std::fs::create_dir(p)).expect("free");
        std::fs::write(part.join("file"), "x").expect("written");
        partial.publish(&to).expect("moved");
        assert!(!part.exists() && to.join("file").exists());
    }
}
